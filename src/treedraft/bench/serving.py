"""Load on an OpenAI endpoint: requests arrive at random times, whether or not the earlier ones are done."""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from treedraft.errors import ConfigError, RequestError

if TYPE_CHECKING:
    import httpx

    from treedraft.cli.prompts import PromptLine

Prompt = str | list[int]
PERCENTILES = (50, 90, 99)
ENDPOINTS = {"completions": "/completions", "chat": "/chat/completions"}


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths, each at least 1. The mean is (low + high) / 2."""

    kind: str  # "fixed": low is high; "uniform": low..high, both included; "exponential": rounded up, low is high
    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        """Draw one length."""
        if self.kind == "exponential":
            return max(1, math.ceil(rng.expovariate(1 / self.low)))
        return rng.randint(self.low, self.high)


def parse_lengths(text: str) -> Lengths:
    """Read "128", "16-256" (uniform) or "exp:128" (exponential, with that mean).

    Raises:
        ConfigError: the text is no distribution of lengths.
    """
    kind = "exponential" if text.startswith("exp:") else "uniform" if "-" in text else "fixed"
    try:
        low, _, high = text.removeprefix("exp:").partition("-")
        lengths = Lengths(kind, int(low), int(high or low))
    except ValueError:
        lengths = Lengths(kind, 0, 0)
    if not 1 <= lengths.low <= lengths.high:
        raise ConfigError(f"lengths are given as 128, 16-256 (uniform) or exp:128 (mean), all at least 1; got {text!r}")
    return lengths


@dataclass(frozen=True)
class ServingSettings:
    """What load is made."""

    base_url: str  # with or without its /v1
    model: str | None = None  # None: the first that the server names
    endpoint: str = "completions"  # or chat
    rate: float = math.inf  # requests a second, Poisson; inf: all at once
    num_prompts: int = 100
    concurrency: int | None = (
        None  # requests in flight at most; a request that waits for its turn is counted as waiting
    )
    prompt_words: Lengths | None = None  # None: the prompts as they are
    output_tokens: Lengths = Lengths("fixed", 128, 128)
    temperature: float = 0.0
    seed: int = 0  # of arrivals and lengths; request i samples with seed + i
    ignore_eos: bool = True  # an extension that most servers know: every output gets its length
    speculation: bool = True  # False: asks the server, in treedraft's extension field, to go without
    api_key: str | None = None
    timeout_s: float = 600.0  # for a whole request

    def check(self) -> None:
        """Raise ConfigError where a setting makes no sense."""
        for name in ("num_prompts", "rate", "timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be more than 0; got {getattr(self, name)}")
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1; got {self.concurrency}")
        if self.endpoint not in ENDPOINTS:
            raise ConfigError(f"the endpoint must be completions or chat; got {self.endpoint!r}")

    @property
    def api_url(self) -> str:
        """The base URL with its /v1."""
        url = self.base_url.rstrip("/")
        return url if url.endswith("/v1") else url + "/v1"


@dataclass(frozen=True)
class PlannedRequest:
    """One request of the load, before it is sent."""

    arrival_s: float  # after the start
    prompt: Prompt
    max_tokens: int
    seed: int


@dataclass(frozen=True)
class RequestRecord:
    """What became of one request. Times in seconds; the server's time begins when the request is sent."""

    arrival_s: float
    wait_s: float  # from its arrival to its sending: for its turn under the concurrency cap, or a late client
    ttft_s: float | None  # None: no token came
    e2e_s: float
    gaps_s: tuple[float, ...]  # between successive chunks with text
    num_prompt_tokens: int | None  # as the server counts
    num_output_tokens: int  # as the server counts; else the number of chunks
    accept_length: float | None  # tokens a round as the server says, in treedraft's `metrics`
    accepted_per_depth: tuple[float, ...]
    error: str | None

    @property
    def tpot_s(self) -> float | None:
        """Time of each token after the first."""
        if self.ttft_s is None or self.num_output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def tokens_per_chunk(self) -> float | None:
        """Tokens of each chunk after the first: what acceptance looks like from outside, if chunks are rounds."""
        return (self.num_output_tokens - 1) / len(self.gaps_s) if self.gaps_s else None


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that `percent` of them do not exceed, interpolated between neighbours; NaN of none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class ServingResult:
    """What `bench serving` found."""

    settings: ServingSettings
    model: str
    elapsed_s: float  # from the first arrival to the last answer
    records: tuple[RequestRecord, ...]

    @property
    def done(self) -> tuple[RequestRecord, ...]:
        """The requests that were answered."""
        return tuple(r for r in self.records if r.error is None)

    def series(self) -> dict[str, list[float]]:
        """Every measured quantity, over the requests that were answered. Times in milliseconds."""
        done = self.done
        series: dict[str, list[float | None]] = {
            "ttft_ms": [_ms(r.ttft_s) for r in done],
            "itl_ms": [1e3 * gap for r in done for gap in r.gaps_s],
            "tpot_ms": [_ms(r.tpot_s) for r in done],
            "e2e_ms": [1e3 * r.e2e_s for r in done],
            "client_wait_ms": [1e3 * r.wait_s for r in done],
            "accept_length": [r.accept_length for r in done],
            "tokens_per_chunk": [r.tokens_per_chunk for r in done],
        }
        return {name: [v for v in values if v is not None] for name, values in series.items()}

    def summary(self) -> dict[str, Any]:
        """Throughput and counts; of each quantity the mean and percentiles; acceptance at each depth, mean."""
        done = self.done
        output = sum(r.num_output_tokens for r in done)
        prompt = [r.num_prompt_tokens for r in done if r.num_prompt_tokens is not None]
        quantities = {
            name: {"mean": statistics.fmean(v) if v else math.nan} | {f"p{p}": percentile(v, p) for p in PERCENTILES}
            for name, v in self.series().items()
        }
        depths = [r.accepted_per_depth for r in done if r.accepted_per_depth]
        deepest = max(map(len, depths), default=0)
        return {
            "num_requests": len(self.records),
            "num_failed": len(self.records) - len(done),
            "elapsed_s": self.elapsed_s,
            "requests_per_s": len(done) / self.elapsed_s,
            "output_tokens": output,
            "output_tokens_per_s": output / self.elapsed_s,
            "prompt_tokens": sum(prompt) if prompt else None,
            **quantities,
            "accepted_per_depth": [sum(d[i] for d in depths if i < len(d)) / len(depths) for i in range(deepest)],
        }

    def errors(self) -> dict[str, int]:
        """How often each error came."""
        messages = [r.error for r in self.records if r.error is not None]
        return {message: messages.count(message) for message in dict.fromkeys(messages)}

    def as_json(self) -> dict[str, Any]:
        """The result as JSON values; the API key is left out."""
        settings = {k: v for k, v in asdict(self.settings).items() if k != "api_key"}
        records = [asdict(r) for r in self.records]
        head = {"settings": settings, "model": self.model, "summary": self.summary(), "errors": self.errors()}
        return head | {"records": records}

    def render(self) -> RenderableType:
        """The result as a table."""
        s, summary = self.settings, self.summary()
        table = Table(box=None)
        for i, name in enumerate(("", "mean", *(f"p{p}" for p in PERCENTILES))):
            table.add_column(name, justify="left" if i == 0 else "right")
        rows = (
            ("time to first token, ms", "ttft_ms", ".1f"),
            ("between chunks (ITL), ms", "itl_ms", ".1f"),
            ("for each token after the first, ms", "tpot_ms", ".2f"),
            ("whole request, ms", "e2e_ms", ".0f"),
            ("waited in this client, ms", "client_wait_ms", ".1f"),
            ("tokens a round (acceptance)", "accept_length", ".2f"),
            ("tokens a chunk", "tokens_per_chunk", ".2f"),
        )
        for title, name, form in rows:
            if not math.isnan(summary[name]["mean"]):
                table.add_row(title, *(format(value, form) for value in summary[name].values()))
        rate = "all at once" if math.isinf(s.rate) else f"{s.rate:g} requests/s, Poisson"
        cap = "" if s.concurrency is None else f", at most {s.concurrency} at once"
        depths = ", ".join(f"{share:.0%}" for share in summary["accepted_per_depth"])
        head = (
            f"{s.num_prompts} requests to {self.model} at {s.api_url}: {rate}{cap}\n"
            f"{len(self.done)} answered, {summary['num_failed']} failed in {self.elapsed_s:.1f} s: "
            f"{summary['requests_per_s']:.2f} requests/s, {summary['output_tokens_per_s']:.1f} output tokens/s"
        )
        tail = [f"accepted at depth 1, 2, ...: {depths}"] if depths else []
        tail += [f"failed, {count} times: {message}" for message, count in self.errors().items()]
        return Group(Text(head), table, *map(Text, tail))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


# ---------------------------------------------------------------- the load


def plan_requests(prompts: Sequence[PromptLine], settings: ServingSettings) -> list[PlannedRequest]:
    """Draw arrivals and lengths, all from the seed; prompts are taken in turn.

    Raises:
        RequestError: a prompt of token ids where words or messages are needed.
    """
    arrivals, lengths = random.Random(f"{settings.seed} arrivals"), random.Random(f"{settings.seed} lengths")
    needs_text = settings.prompt_words is not None or settings.endpoint == "chat"
    if needs_text and not all(isinstance(line.prompt, str) for line in prompts):
        raise RequestError("prompts of token ids go to the completions endpoint, and have no words to be cut at")
    planned, arrival_s = [], 0.0
    for i in range(settings.num_prompts):
        prompt = prompts[i % len(prompts)].prompt
        if settings.prompt_words is not None:
            prompt = prompt_of_words([str(line.prompt) for line in prompts], i, settings.prompt_words.draw(lengths))
        planned.append(PlannedRequest(arrival_s, prompt, settings.output_tokens.draw(lengths), settings.seed + i))
        arrival_s += 0.0 if math.isinf(settings.rate) else arrivals.expovariate(settings.rate)
    return planned


def prompt_of_words(texts: Sequence[str], start: int, num_words: int) -> str:
    """Exactly `num_words` words: of text number `start`, and of those after it while they do not suffice."""
    if not any(text.split() for text in texts):
        raise RequestError("the prompts have no words to make prompts of")
    words: list[str] = []
    while len(words) < num_words:
        words += texts[start % len(texts)].split()
        start += 1
    return " ".join(words[:num_words])


def run_serving(
    prompts: Sequence[PromptLine],
    settings: ServingSettings,
    note: Callable[[str], None] = lambda text: None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> ServingResult:
    """Send the load and wait for every answer. A request that fails is counted, and the others go on.

    transport: of httpx, for tests.

    Raises:
        ConfigError: a setting that makes no sense, httpx is missing, or the server cannot be asked for its model.
    """
    settings.check()
    try:
        import httpx  # noqa: F401
    except ImportError as error:
        raise ConfigError("bench serving needs httpx: pip install 'treedraft[server]'") from error
    planned = plan_requests(prompts, settings)
    return asyncio.run(_run(planned, settings, note, transport))


async def _run(
    planned: list[PlannedRequest],
    settings: ServingSettings,
    note: Callable[[str], None],
    transport: httpx.AsyncBaseTransport | None,
) -> ServingResult:
    import httpx

    headers = {} if settings.api_key is None else {"Authorization": f"Bearer {settings.api_key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)  # the load decides, not the pool
    async with httpx.AsyncClient(headers=headers, timeout=settings.timeout_s, limits=limits, transport=transport) as c:
        model = settings.model or await _first_model(c, settings)
        slots = asyncio.Semaphore(settings.concurrency or len(planned))
        begin = time.perf_counter()
        finished = 0

        async def run_one(request: PlannedRequest) -> RequestRecord:
            nonlocal finished
            await asyncio.sleep(max(0.0, request.arrival_s - (time.perf_counter() - begin)))
            async with slots:
                wait_s = time.perf_counter() - begin - request.arrival_s
                record = await _send(c, request, model, settings, wait_s)
            finished += 1
            if finished % max(1, len(planned) // 10) == 0:
                note(f"{finished} of {len(planned)} requests done after {time.perf_counter() - begin:.1f} s")
            return record

        records = await asyncio.gather(*map(run_one, planned))
        return ServingResult(settings, model, time.perf_counter() - begin, tuple(records))


async def _first_model(client: httpx.AsyncClient, settings: ServingSettings) -> str:
    import httpx

    try:
        answer = await client.get(f"{settings.api_url}/models")
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"cannot ask {settings.api_url}/models for a model ({problem}); is the server up? Else give --model"
        ) from error


def request_body(request: PlannedRequest, model: str, settings: ServingSettings) -> dict[str, Any]:
    """The JSON body of one request."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": request.max_tokens,
        "temperature": settings.temperature,
        "seed": request.seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if settings.ignore_eos:
        body["ignore_eos"] = True
    if not settings.speculation:
        body["speculative"] = {"enabled": False}
    if settings.endpoint == "chat":
        return body | {"messages": [{"role": "user", "content": request.prompt}]}
    return body | {"prompt": request.prompt}


async def _send(
    client: httpx.AsyncClient, request: PlannedRequest, model: str, settings: ServingSettings, wait_s: float
) -> RequestRecord:
    """Send one request and read its stream. Any failure of the request becomes its error."""
    import httpx

    sent = time.perf_counter()
    times: list[float] = []
    usage: dict[str, Any] = {}
    metrics: dict[str, Any] = {}
    accept_length: float | None = None
    accepted_per_depth: tuple[float, ...] = ()
    error: str | None = None
    try:
        url = settings.api_url + ENDPOINTS[settings.endpoint]
        async with asyncio.timeout(settings.timeout_s):
            async with client.stream("POST", url, json=request_body(request, model, settings)) as answer:
                if answer.status_code != 200:
                    text = (await answer.aread()).decode("utf-8", "replace")
                    raise RequestError(f"HTTP {answer.status_code}: {_error_message(text)}")
                async for chunk in _chunks(answer):
                    if has_text(chunk):
                        times.append(time.perf_counter())
                    usage = chunk.get("usage") or usage
                    metrics = chunk.get("metrics") or metrics
        if not times:
            raise RequestError("the stream ended without a token")
        accept_length = None if metrics.get("accept_length") is None else float(metrics["accept_length"])
        accepted_per_depth = tuple(map(float, metrics.get("accepted_per_depth") or ()))
    except TimeoutError:
        error = f"no complete answer within {settings.timeout_s:g} s"
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, RequestError) as failure:
        error = str(failure) or type(failure).__name__
    except (ValueError, LookupError, TypeError, AttributeError) as failure:  # a stream that is not OpenAI's
        error = f"an answer that cannot be read: {type(failure).__name__}: {failure}"
    return RequestRecord(
        arrival_s=request.arrival_s,
        wait_s=wait_s,
        ttft_s=times[0] - sent if times else None,
        e2e_s=time.perf_counter() - sent,
        gaps_s=tuple(b - a for a, b in zip(times, times[1:])),
        num_prompt_tokens=usage.get("prompt_tokens"),
        num_output_tokens=usage.get("completion_tokens") or len(times),
        accept_length=accept_length,
        accepted_per_depth=accepted_per_depth,
        error=error,
    )


async def _chunks(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a stream of server-sent events, up to [DONE].

    Raises:
        RequestError: the stream carries an error, or ends before [DONE].
    """
    async for line in answer.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        chunk = json.loads(data)
        if chunk.get("error"):
            raise RequestError(f"in the stream: {_error_message(data)}")
        yield chunk
    raise RequestError("the stream ended before [DONE]")


def has_text(chunk: dict[str, Any]) -> bool:
    """Whether a chunk brings text: of a completion, or of a message, its reasoning included."""
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"):
            return True
    return False


def _error_message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return text[:200]
