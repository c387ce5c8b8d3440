"""Output tokens a second of parallel streams beside one request after another: python benchmarks/throughput.py [flags]

The server is `treedraft serve` in a process of its own, with the same settings for both; this process is the client.
Loop and streams take turns with the same requests, so that what else the machine does strikes both. The clients' texts
are compared afterwards. Flags that are not listed go to the server, for instance --speculative-num-draft-tokens auto.
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


def start_server(flags: list[str], num_streams: int) -> tuple[subprocess.Popen[str], int]:
    """Start `treedraft serve` on a free port; returns it and its port once it takes requests."""
    command = [sys.executable, "-m", "treedraft", "serve", "--port", "0", "--max-batch", str(num_streams)]
    server = subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True)
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
    parser.add_argument("--repeats", type=int, default=3, help="turns of loop and streams")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args, server_flags = parser.parse_known_args()
    flags = ["--disable-radix-cache", *server_flags]  # later turns would find the prompts of earlier ones
    lines = (files("treedraft") / "demo" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    fixed = {"max_tokens": args.tokens, "temperature": args.temperature, "ignore_eos": True, "seed": 0}
    fixed |= {"stream": True, "stream_options": {"include_usage": True}}
    prompts = [json.loads(lines[i % len(lines)])["prompt"] for i in range(args.requests)]
    bodies = [json.dumps({"prompt": prompt} | fixed).encode() for prompt in prompts]

    server, port = start_server(flags, args.streams)
    try:
        asyncio.run(send_all(port, bodies[: 2 * args.streams], args.streams))  # rounds are recorded once they paid
        asyncio.run(send_all(port, bodies[:4], 1))
        turns = []
        for number in range(args.repeats):
            turns.append({n: asyncio.run(send_all(port, bodies, n)) for n in (1, args.streams)})
            rates = {n: args.tokens * len(bodies) / elapsed_s for n, (elapsed_s, _) in turns[-1].items()}
            print(f"turn {number}: loop {rates[1]:.1f} tokens/s, {args.streams} streams {rates[args.streams]:.1f}, "
                  f"{rates[args.streams] / rates[1]:.2f} times", flush=True)  # fmt: skip
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
    print(write_result(args.out, "throughput", summary(args, flags, turns)))


def summary(
    args: argparse.Namespace, flags: list[str], turns: list[dict[int, tuple[float, list[Answer]]]]
) -> dict[str, Any]:
    """What the turns say."""

    def side(num_streams: int) -> dict[str, Any]:
        answers = [answer for turn in turns for answer in turn[num_streams][1]]
        rates = [sum(a.num_tokens for a in turn[num_streams][1]) / turn[num_streams][0] for turn in turns]
        lengths = [a.accept_length for a in answers if a.accept_length is not None]
        return {
            "tokens_per_s": rates,
            "median_tokens_per_s": statistics.median(rates),
            "accept_length": statistics.fmean(lengths) if lengths else None,
        }

    loop, streams = side(1), side(args.streams)
    ratios = [b / a for a, b in zip(loop["tokens_per_s"], streams["tokens_per_s"], strict=True)]
    pairs = [pair for turn in turns for pair in zip(turn[1][1], turn[args.streams][1], strict=True)]
    return {
        "settings": {k: v for k, v in vars(args).items() if k != "out"} | {"server_flags": flags},
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "loop": loop,
        "streams": streams,
        "ratios": ratios,
        "median_ratio": statistics.median(ratios),
        "num_texts": len(pairs),
        "num_texts_that_differ": sum(a.text != b.text for a, b in pairs),
    }


if __name__ == "__main__":
    main()
