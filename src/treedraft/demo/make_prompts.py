"""Cut prompts.jsonl out of the documents held out of training: python -m treedraft.demo.make_prompts CORPUS_FOLDER

The folder holds heldout.json ({domain: [document, ...]}) and, by domain, JSON lines of `src` and `text`. Each prompt is
the opening of a paragraph (prose) or of a file, class or function (code), 24 to 64 tokens long, ending at a word's end.
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

PER_DOMAIN = 24
MIN_TOKENS, MAX_TOKENS = 24, 64
FILES = {"story": ["story"], "kid": ["kid"], "fiction": ["fiction_a", "fiction_b", "fiction"], "code": ["code"]}
STARTS = {"code": r"\A|^(?=class |def |    def )"}  # prose: paragraphs
BOOKS = "classic-books-markdown: "
PACKAGES = {
    "python-stdlib": "Python 3.11 standard library, PSF-2.0",
    "torch": "torch 2.13.0, BSD-3-Clause",
    "transformers": "transformers 5.24.0, Apache-2.0",
    "sympy": "sympy, BSD-3-Clause",
    "networkx": "networkx, BSD-3-Clause",
    "numpy": "numpy, BSD-3-Clause",
}


def make_prompts(corpus: Path, encode: Any, seed: int = 0) -> list[dict[str, Any]]:
    """Return PER_DOMAIN prompts a domain; `encode(text)` gives tokens with character offsets (tokenizers.Encoding)."""
    heldout = json.loads((corpus / "heldout.json").read_text())
    rng = random.Random(seed)
    prompts = []
    for domain, names in FILES.items():
        texts = _read_documents(corpus, names, set(heldout[domain]))
        count = 0
        # Documents in turn, so that none outweighs the others: first each one's opening, then passages inside.
        passages = {src: _passages(domain, texts[src], rng) for src in sorted(texts)}
        while count < PER_DOMAIN and passages:
            for src in list(passages):
                text = next(passages[src], None)
                if text is None:
                    del passages[src]
                    continue
                prompt, num_tokens = _cut(text, encode, rng.randint(MIN_TOKENS, MAX_TOKENS))
                if num_tokens >= MIN_TOKENS and count < PER_DOMAIN:
                    prompts.append({"domain": domain, "prompt": prompt, "source": _source(domain, src)})
                    count += 1
    return prompts


def _read_documents(corpus: Path, names: list[str], wanted: set[str]) -> dict[str, str]:
    found = {}
    for name in names:
        file = corpus / f"{name}.jsonl"
        for line in file.open(encoding="utf-8") if file.exists() else ():
            document = json.loads(line)
            if document["src"] in wanted:
                found[document["src"]] = document["text"]
    return found


def _passages(domain: str, text: str, rng: random.Random) -> Any:
    """The document's opening, then other starts in random order, at least 400 characters apart."""
    starts = [m.end() for m in re.finditer(STARTS.get(domain, r"\A|\n\n+(?=[A-Z\"])"), text, flags=re.MULTILINE)]
    starts = [s for s in starts if len(text) - s >= 250]
    rest = starts[1:]
    rng.shuffle(rest)
    taken: list[int] = []
    for start in starts[:1] + rest:
        if all(abs(start - other) >= 400 for other in taken):
            taken.append(start)
            yield text[start:]


def _cut(text: str, encode: Any, num_tokens: int) -> tuple[str, int]:
    """The text's first `num_tokens` tokens at most, ending at a word's end."""
    head = text[: 12 * num_tokens]
    offsets = encode(head).offsets
    end = offsets[min(num_tokens, len(offsets)) - 1][1]
    while end > 0 and not (head[end - 1].isalnum() or head[end - 1] in ",.;:\"')") or head[end : end + 1].isalnum():
        end -= 1
    prompt = head[:end]
    return prompt, len(encode(prompt).ids)


def _source(domain: str, src: str) -> str:
    if domain == "story":
        return f"global-asp (African Storybook, Pratham Books): {src}, CC BY"
    if domain == "code":
        package, path = src.split(":", 1)
        return f"{path}: {PACKAGES[package]}"
    return f"{BOOKS}{src}, public domain in the US"


def main() -> None:
    from tokenizers import Tokenizer

    here = Path(__file__).parent
    tokenizer = Tokenizer.from_file(str(here / "model" / "tokenizer.json"))
    prompts = make_prompts(Path(sys.argv[1]), tokenizer.encode)
    lines = [json.dumps(prompt, ensure_ascii=False) for prompt in prompts]
    (here / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
