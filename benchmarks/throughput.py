"""Output tokens a second of parallel streams beside one request after another: python benchmarks/throughput.py [flags]

The server is `treedraft serve` in a process of its own, with the same settings for both; this process is the client.
Loop and streams take turns with the same requests, so that what else the machine does strikes both. The server's CPU
time is told beside the clock's, since it depends less on others; its ratio is that of the work for a token. Texts are
compared afterwards. Flags that are not listed go to the server, for instance --speculative-num-draft-tokens auto.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from treedraft.bench.results import write_result

STARTED = re.compile(r"running on http://127\.0\.0\.1:(\d+)")


@dataclass(frozen=True)
class Answer:
    """One stream as a client sees it."""

    text: str
    num_tokens: int
    accept_length: float | None


def read_answer(raw: bytes) -> Answer:
    """Read an HTTP response of server-sent events, its chunked encoding left in."""
    assert raw.startswith(b"HTTP/1.1 200 ") and b"data: [DONE]" in raw, raw[:500]
    lines = (line for line in raw.split(b"\r\n") if line.startswith(b"data: {"))
    chunks = [json.loads(event[6:]) for line in lines for event in line.split(b"\n\n") if event.startswith(b"data: {")]
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    last = chunks[-1]
    return Answer(text, last["usage"]["completion_tokens"], last["metrics"]["accept_length"])


@dataclass(frozen=True)
class Turn:
    """All requests once, by the loop or by the streams."""

    elapsed_s: float
    cpu_s: float  # of the server
    answers: tuple[Answer, ...]

    @property
    def num_tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.elapsed_s

    @property
    def cpu_us_per_token(self) -> float:
        return 1e6 * self.cpu_s / self.num_tokens


async def send(port: int, body: bytes) -> bytes:
    """Send one request and return all that comes back. It is read afterwards: a client costs its machine little."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    raw = await reader.read()
    writer.close()
    return raw


async def send_all(port: int, bodies: list[bytes], num_streams: int) -> tuple[float, list[Answer]]:
    """Send every body, at most `num_streams` at a time; returns seconds, and the answers in order."""
    raw: list[bytes] = [b""] * len(bodies)
    left = iter(range(len(bodies)))

    async def stream() -> None:
        for i in left:
            raw[i] = await send(port, bodies[i])

    began_s = time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(num_streams)))
    elapsed_s = time.perf_counter() - began_s
    return elapsed_s, [read_answer(each) for each in raw]


def cpu_seconds(server: subprocess.Popen[str]) -> float:
    """CPU time of the server so far, all threads together."""
    fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def take_turn(server: subprocess.Popen[str], port: int, bodies: list[bytes], num_streams: int) -> Turn:
    """Send every body, at most `num_streams` at a time."""
    before_s = cpu_seconds(server)
    elapsed_s, answers = asyncio.run(send_all(port, bodies, num_streams))
    return Turn(elapsed_s, cpu_seconds(server) - before_s, tuple(answers))


def start_server(flags: list[str], num_streams: int, threads: int | None) -> tuple[subprocess.Popen[str], int]:
    """Start `treedraft serve` on a free port; returns it and its port once it takes requests."""
    env = os.environ | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    command = [sys.executable, "-m", "treedraft", "serve", "--port", "0", "--max-batch", str(num_streams)]
    server = subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True, env=env)
    assert server.stderr is not None
    for line in server.stderr:
        if found := STARTED.search(line):
            return server, int(found[1])
    raise SystemExit(f"the server did not start: exit code {server.wait()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of each request")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=None, help="of the server's torch; default: torch's own choice")
    parser.add_argument("--repeats", type=int, default=3, help="turns of loop and streams")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args, server_flags = parser.parse_known_args()
    flags = ["--disable-radix-cache", *server_flags]  # later turns would find the prompts of earlier ones
    lines = (files("treedraft") / "demo" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    fixed = {"max_tokens": args.tokens, "temperature": args.temperature, "ignore_eos": True, "seed": 0}
    fixed |= {"stream": True, "stream_options": {"include_usage": True}}
    prompts = [json.loads(lines[i % len(lines)])["prompt"] for i in range(args.requests)]
    bodies = [json.dumps({"prompt": prompt} | fixed).encode() for prompt in prompts]

    server, port = start_server(flags, args.streams, args.threads)
    try:
        asyncio.run(send_all(port, bodies[: 2 * args.streams], args.streams))  # rounds are recorded once they paid
        asyncio.run(send_all(port, bodies[:4], 1))
        turns = []
        for number in range(args.repeats):
            loop, streams = (take_turn(server, port, bodies, n) for n in (1, args.streams))
            turns.append((loop, streams))
            print(f"turn {number}: loop {loop.tokens_per_s:.1f} tokens/s, {args.streams} streams "
                  f"{streams.tokens_per_s:.1f}, {streams.tokens_per_s / loop.tokens_per_s:.2f} times; "
                  f"CPU {loop.cpu_us_per_token:.0f} and {streams.cpu_us_per_token:.0f} us a token, "
                  f"{loop.cpu_us_per_token / streams.cpu_us_per_token:.2f} times", flush=True)  # fmt: skip
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
    print(write_result(args.out, "throughput", summary(args, flags, turns)))


def summary(args: argparse.Namespace, flags: list[str], turns: list[tuple[Turn, Turn]]) -> dict[str, Any]:
    """What the turns say; each is of the loop and of the streams."""

    def side(of: Sequence[Turn]) -> dict[str, Any]:
        lengths = [a.accept_length for turn in of for a in turn.answers if a.accept_length is not None]
        return {
            "tokens_per_s": [turn.tokens_per_s for turn in of],
            "median_tokens_per_s": statistics.median(turn.tokens_per_s for turn in of),
            "cpu_us_per_token": [turn.cpu_us_per_token for turn in of],
            "accept_length": statistics.fmean(lengths) if lengths else None,
        }

    pairs = [pair for loop, streams in turns for pair in zip(loop.answers, streams.answers, strict=True)]
    return {
        "settings": {k: v for k, v in vars(args).items() if k != "out"} | {"server_flags": flags},
        "loop": side([loop for loop, _ in turns]),
        "streams": side([streams for _, streams in turns]),
        "median_ratio": statistics.median(streams.tokens_per_s / loop.tokens_per_s for loop, streams in turns),
        "ratios": [streams.tokens_per_s / loop.tokens_per_s for loop, streams in turns],
        "cpu_ratios": [loop.cpu_us_per_token / streams.cpu_us_per_token for loop, streams in turns],
        "num_texts": len(pairs),
        "num_texts_that_differ": sum(a.text != b.text for a, b in pairs),
    }


if __name__ == "__main__":
    main()
