"""Load on a real server process, on a CPU: python benchmarks/load.py [flags as in --help]. Linux alone: reads /proc.

A batch is --requests requests to the demo model in float64, --at-once of them at a time, with KV pages for a third of
those. All must finish, with the text of the same request alone in an engine without tree, cache or want of pages. The
batch is repeated for --minutes while the server's memory is sampled: it grows while kinds of rounds are recorded, up
to runner.capture.MAX_RECORDS of them, and then no more; then --storm streams are cut at random moments.
After each batch and the storm nothing may be left: no request, no page in use, no connection.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from treedraft import LLM, SamplingParams
from treedraft.bench.results import write_result
from treedraft.cli.prompts import read_prompts

MAX_CONTEXT, PAGE_SIZE = 256, 4
# Prompts short beside the outputs, and a small tree: many are admitted that cannot all go on to their ends, so that
# some are preempted. A larger tree keeps so much room for itself that it only shrinks.
PROMPT_TOKENS, NUM_STEPS, TOPK, NUM_DRAFT_TOKENS = 12, 3, 2, 6
TIMEOUT_S = 300.0
SAMPLED_EACH_S = 2.0


@dataclass(frozen=True)
class Case:
    """One request and the text that it must have."""

    prompt: list[int]
    params: SamplingParams
    is_stream: bool
    text: str
    finish_reason: str

    @property
    def body(self) -> dict[str, Any]:
        p = self.params
        fields = {"max_tokens": p.max_tokens, "temperature": p.temperature, "top_p": p.top_p, "seed": p.seed}
        penalties = {"repetition_penalty": p.repetition_penalty}
        return {"prompt": self.prompt, "stream": self.is_stream, **fields, **penalties}


class Server:
    """`treedraft serve` in a process of its own."""

    def __init__(self, flags: Sequence[str]):
        command = [sys.executable, "-m", "treedraft", "serve", "--port", "0", *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        self.log = tempfile.TemporaryFile("w+")  # a pipe that nobody reads would fill up
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, env=environment)
        while (found := re.search(r"running on (http://\S+)", self.log_text())) is None:
            if self.process.poll() is not None:
                raise SystemExit(f"the server did not start:\n{self.log_text()}")
            time.sleep(0.1)
        self.url = found[1]

    def log_text(self) -> str:
        return os.pread(self.log.fileno(), 2**20, 0).decode(errors="replace")

    def memory_mib(self) -> dict[str, float]:
        """Resident memory, and what of it is no file."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        found = {key: int(re.search(rf"{name}:\s+(\d+) kB", text)[1]) for key, name in FIELDS.items()}  # type: ignore[index]
        return {key: round(kib / 1024, 1) for key, kib in found.items()}

    def num_sockets(self) -> int:
        folder = Path(f"/proc/{self.process.pid}/fd")
        return sum(os.readlink(entry).startswith("socket:") for entry in folder.iterdir())

    def metrics(self) -> dict[str, float]:
        lines = [x for x in httpx.get(f"{self.url}/metrics").text.splitlines() if not x.startswith("#")]
        return {name.removeprefix("treedraft:"): float(value) for name, value in (x.rsplit(" ", 1) for x in lines)}

    def wait_until_idle(self, timeout_s: float = 60) -> dict[str, float]:
        """Wait until nothing is left; raises when something stays. Returns the metrics."""
        end_s = time.monotonic() + timeout_s
        while True:
            found = self.metrics()
            left = {name: found[name] for name in LEFT if found[name]}
            if not left and self.num_sockets() <= IDLE_SOCKETS:
                return found
            if time.monotonic() > end_s:
                raise SystemExit(f"still there after {timeout_s:g} s: {left}, {self.num_sockets()} sockets")
            time.sleep(0.1)

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(60)


FIELDS = {"rss": "VmRSS", "anonymous": "RssAnon"}
LEFT = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
IDLE_SOCKETS = 4  # the one it listens on, the event loop's own pair, and one to spare


# ---------------------------------------------------------------- what is asked


def make_cases(number: int) -> tuple[list[Case], int]:
    """Requests with their solo texts, and the bytes of a KV page."""
    llm = LLM(
        "demo",
        device="cpu",
        dtype="float64",
        max_batch=1,
        max_context=MAX_CONTEXT,
        speculative=None,
        prefix_cache=False,
    )
    rng = random.Random(0)
    prompts = [
        llm.encode(line.prompt) if isinstance(line.prompt, str) else line.prompt for line in read_prompts("demo")
    ]
    cases = []
    for i in range(number):
        params = SamplingParams(
            max_tokens=rng.randrange(16, 81),
            temperature=rng.choice([0.0, 0.8, 1.0]),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            seed=i,
        )
        prompt = prompts[i % len(prompts)][:PROMPT_TOKENS]
        [choice] = llm.generate([prompt], params, progress=False)[0].outputs
        cases.append(Case(prompt, params, i % 2 == 0, choice.text, choice.finish_reason))
    with_head = LLM("demo", device="cpu", dtype="float64", max_batch=1, max_context=MAX_CONTEXT, page_size=PAGE_SIZE)
    num_pages = with_head.engine.scheduler.num_pages + 2
    return cases, sum(with_head.info()["bytes"].values()) // num_pages


def pages_of(case: Case) -> int:
    return -(-(len(case.prompt) + case.params.max_tokens) // PAGE_SIZE)


# ---------------------------------------------------------------- asking


async def ask(client: httpx.AsyncClient, case: Case) -> str | None:
    """What is wrong with the answer; None: nothing."""
    if not case.is_stream:
        answer = await client.post("/v1/completions", json=case.body)
        if answer.status_code != 200:
            return f"{answer.status_code}: {answer.text[:300]}"
        [choice] = answer.json()["choices"]
        return difference(case, choice["text"], choice["finish_reason"])
    text, reason = "", None
    async with client.stream("POST", "/v1/completions", json=case.body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = httpx.Response(200, content=line[6:]).json()
                if "error" in event:
                    return str(event["error"])
                for choice in event["choices"]:
                    text, reason = text + choice["text"], choice["finish_reason"] or reason
    return difference(case, text, reason)


def difference(case: Case, text: str, reason: str | None) -> str | None:
    if (text, reason) == (case.text, case.finish_reason):
        return None
    return f"seed {case.params.seed}: {text!r} ({reason}) is not {case.text!r} ({case.finish_reason})"


async def run_batch(url: str, cases: Sequence[Case], at_once: int) -> list[str]:
    """Send every case; returns what went wrong."""
    gate = asyncio.Semaphore(at_once)

    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=httpx.Limits()) as client:

        async def one(case: Case) -> str | None:
            async with gate:
                try:
                    return await ask(client, case)
                except httpx.HTTPError as error:
                    return f"lost, {type(error).__name__}: {error}"

        return [problem for problem in await asyncio.gather(*map(one, cases)) if problem is not None]


async def storm(url: str, number: int, seed: int) -> dict[str, int]:
    """Streams begun within half a minute, each cut at a random moment: while it connects, waits or writes.

    A third of them are no streams.
    """
    rng = random.Random(seed)
    counts = {"cut": 0, "finished": 0, "chunks": 0}

    async def one(begin_s: float, wait_s: float, body: dict[str, Any]) -> None:
        await asyncio.sleep(begin_s)
        # verify: reading certificates for each of them takes longer than the storm
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, verify=False) as client:
            try:
                async with asyncio.timeout(wait_s), client.stream("POST", "/v1/completions", json=body) as answer:
                    async for line in answer.aiter_lines():
                        counts["chunks"] += line.startswith("data: {")
                counts["finished"] += 1
            except TimeoutError:
                counts["cut"] += 1

    bodies = [
        {
            "prompt": "Once upon a time",
            "max_tokens": 150,
            "ignore_eos": True,
            "stream": i % 3 > 0,
            "n": 1 + (i % 5 == 0),
        }
        for i in range(number)
    ]
    await asyncio.gather(*(one(rng.uniform(0, 30), rng.uniform(0.01, 8), body) for body in bodies))
    return counts


# ---------------------------------------------------------------- the run


async def sample(server: Server, begun_s: float, samples: list[dict[str, float]]) -> None:
    while True:
        samples.append({"s": round(time.monotonic() - begun_s, 1), **server.memory_mib()})
        await asyncio.sleep(SAMPLED_EACH_S)


async def load(server: Server, cases: Sequence[Case], at_once: int, minutes: float) -> dict[str, Any]:
    """Batches until the minutes are over, one at least."""
    begun_s = time.monotonic()
    samples: list[dict[str, float]] = []
    batches: list[dict[str, float]] = []
    problems: list[str] = []
    sampling = asyncio.create_task(sample(server, begun_s, samples))
    while not batches or time.monotonic() - begun_s < 60 * minutes:
        started_s = time.monotonic()
        found = await run_batch(server.url, cases, at_once)
        took_s = time.monotonic() - started_s
        metrics = await asyncio.to_thread(server.wait_until_idle)
        problems += found
        batches.append({"s": round(took_s, 1), "problems": len(found), "idle_mib": server.memory_mib()["rss"]})
        print(f"batch {len(batches)}: {took_s:.1f} s, {len(found)} problems, {server.memory_mib()} MiB", flush=True)
    sampling.cancel()
    return {
        "batches": batches,
        "growth_mib_second_half": round(batches[-1]["idle_mib"] - batches[len(batches) // 2 - 1]["idle_mib"], 1),
        "problems": problems[:20],
        "preemptions": metrics["num_preemptions_total"],
        "tokens": metrics["generation_tokens_total"],
        "samples": samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200, help="of a batch")
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--minutes", type=float, default=0, help="repeat the batch for so long; 0: once")
    parser.add_argument("--storm", type=int, default=500, help="streams that are cut; 0: none")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    cases, page_bytes = make_cases(args.requests)
    num_pages = args.at_once * sum(map(pages_of, cases)) // len(cases) // 3
    flags = ["--dtype", "float64", "--max-batch", str(args.at_once), "--max-context", str(MAX_CONTEXT)]
    flags += ["--speculative-num-steps", str(NUM_STEPS), "--speculative-eagle-topk", str(TOPK)]
    flags += ["--speculative-num-draft-tokens", str(NUM_DRAFT_TOKENS)]
    flags += ["--max-queue", "2048", "--page-size", str(PAGE_SIZE), "--kv-memory", str((num_pages + 2) * page_bytes)]
    server = Server(flags)
    try:
        server.wait_until_idle()
        result = {"flags": flags, "pages": num_pages, "start_mib": server.memory_mib()}
        result["load"] = asyncio.run(load(server, cases, args.at_once, args.minutes))
        if args.storm:
            result["storm"] = asyncio.run(storm(server.url, args.storm, seed=0))
            server.wait_until_idle()
            result["storm"]["problems_after"] = len(asyncio.run(run_batch(server.url, cases[:32], args.at_once)))
            result["storm"]["mib_after"] = server.memory_mib()["rss"]
            print("storm:", result["storm"])
    finally:
        code = server.stop()
    result["exit_code"] = code
    print("written:", write_result(args.out, "load", result))
    if not result["load"]["preemptions"]:
        raise SystemExit("nothing was preempted: the run shows less than it should")
    if result["load"]["problems"] or result.get("storm", {}).get("problems_after"):
        raise SystemExit("\n".join(result["load"]["problems"]) or "after the storm texts are wrong")


if __name__ == "__main__":
    main()
