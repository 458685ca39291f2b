"""``normlab.diagnose`` on other people's classes with random weights: what is read, and what is found.

Seconds are processor time, which other work on the machine changes little.

    python benchmarks/foreign.py             # every class at 2 layers, printed
    python benchmarks/foreign.py --write     # every class at 6 layers, BERT and GPT-2 at 24, and the page
    python benchmarks/foreign.py --page      # write docs/foreign-models.md from foreign.json, no measuring

All are made by their own constructors at width 256 with 4 heads, FFN 1024, a vocabulary of 1000 and their own
starts, and see 8 x 64 random tokens (a ViT 8 images of 64 patches); the loss is the model's own, with labels,
or else the mean square of the output against random numbers. Attention is ``eager``, so that it can be seen.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers as tf
import x_transformers as xt
from torch import Tensor, nn
from torch.nn import functional

from normlab.diagnosis import Diagnosis, diagnose, read_structure
from normlab.lab.training.devices import hardware

PAGE = Path(__file__).resolve().parents[1] / "docs/foreign-models.md"
RESULTS = Path(__file__).parent / "results/foreign.json"
DIM, HEADS, FFN, VOCAB, ROWS, LENGTH = 256, 4, 1024, 1000, 8, 64
LAYERS, DEEP, LR, WARMUP = 6, 24, 5e-4, 2000
STARTS = (0.02, DIM**-0.5)
"""Standard deviations of weights: BERT's and GPT-2's own, and Xavier's for a square matrix of this width,
which theory is about.
"""
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1}
Case = tuple[nn.Module, Any]

IDS = torch.randint(5, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
OTHER = torch.randint(5, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(2))
X = torch.randn(ROWS, LENGTH, DIM, generator=torch.Generator().manual_seed(3))


def made(name: str, config: str, **choices: Any) -> nn.Module:
    """A class of transformers."""
    return getattr(tf, name)(getattr(tf, config)(attn_implementation="eager", **SPECIAL, **choices))


def encoder(layers: int, name: str, config: str, **choices: Any) -> Case:
    """A family with BERT's words for sizes."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": DIM,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "intermediate_size": FFN,
    }
    return made(name, config, **sizes | choices), {"input_ids": IDS, "labels": OTHER}


def bert(layers: int, **choices: Any) -> Case:
    """Post-LN."""
    return encoder(layers, "BertForMaskedLM", "BertConfig", **choices)


def gpt2(layers: int, **choices: Any) -> Case:
    """Pre-LN with GPT-2's own words for sizes."""
    sizes = {"vocab_size": VOCAB, "n_embd": DIM, "n_layer": layers, "n_head": HEADS}
    return made("GPT2LMHeadModel", "GPT2Config", **sizes, **choices), {"input_ids": IDS, "labels": IDS}


def t5(layers: int) -> Case:
    """Pre-LN with RMS norms and relative positions."""
    sizes = {"vocab_size": VOCAB, "d_model": DIM, "d_kv": DIM // HEADS, "d_ff": FFN}
    model = made("T5ForConditionalGeneration", "T5Config", **sizes, num_layers=layers, num_heads=HEADS)
    return model, {"input_ids": IDS, "labels": OTHER}


def pair(layers: int, name: str, config: str) -> Case:
    """A family with BART's words for sizes."""
    sizes: dict[str, int] = {"vocab_size": VOCAB, "d_model": DIM}
    for stack in ("encoder", "decoder"):
        sizes |= {f"{stack}_layers": layers, f"{stack}_attention_heads": HEADS, f"{stack}_ffn_dim": FFN}
    return made(name, config, **sizes), {"input_ids": IDS, "labels": OTHER}


def vit(layers: int) -> Case:
    """Images in the place of tokens."""
    model, _ = encoder(layers, "ViTForImageClassification", "ViTConfig", image_size=64, patch_size=8)
    images = torch.randn(ROWS, 3, 64, 64, generator=torch.Generator().manual_seed(4))
    return model, {"pixel_values": images, "labels": torch.arange(ROWS) % 2}


def torch_nn(layers: int) -> Case:
    """Post-LN, as it comes, on random vectors."""
    model = nn.Transformer(DIM, HEADS, layers, layers, FFN, batch_first=True)
    return model, (X, X.flip(0))


def x_transformers(layers: int) -> Case:
    """Pre-LN, as it comes."""
    stack = xt.Decoder(dim=DIM, depth=layers, heads=HEADS)
    return xt.TransformerWrapper(num_tokens=VOCAB, max_seq_len=LENGTH, attn_layers=stack), IDS


class FunctionalNorms(nn.Module):
    """A decoder that computes its norms by functions, as nanochat's own code does: no module is a norm."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.blocks = nn.ModuleList(FunctionalBlock() for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        """The logits of the tokens that follow."""
        x = functional.rms_norm(self.embedding(ids), (DIM,))
        for block in self.blocks:
            x = block(x)
        return self.head(functional.rms_norm(x, (DIM,)))


class FunctionalBlock(nn.Module):
    """Causal attention and a feed-forward network of squared ReLUs, each on a norm that is a function."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, FFN, bias=False), nn.Linear(FFN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The stream after both branches."""
        heads = self.qkv(functional.rms_norm(x, (DIM,))).unflatten(-1, (3, HEADS, -1)).transpose(1, 3)
        q, k, v = heads.unbind(2)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(self.up(functional.rms_norm(x, (DIM,))).relu().square())


IN_DOUBT = "norms as functions"
CLASSES: dict[str, Callable[[int], Case]] = {
    "BERT": bert,
    "GPT-2": gpt2,
    "Llama": lambda n: encoder(n, "LlamaForCausalLM", "LlamaConfig", num_key_value_heads=HEADS),
    "T5": t5,
    "BART": lambda n: pair(n, "BartForConditionalGeneration", "BartConfig"),
    "Marian": lambda n: pair(n, "MarianMTModel", "MarianConfig"),
    "torch.nn.Transformer": torch_nn,
    "x-transformers": x_transformers,
    "ViT": vit,
    "ALBERT": lambda n: encoder(n, "AlbertForMaskedLM", "AlbertConfig", embedding_size=64),
    "Gemma 3": lambda n: encoder(
        n, "Gemma3ForCausalLM", "Gemma3TextConfig", num_key_value_heads=2, head_dim=DIM // HEADS
    ),
    "nanochat": lambda n: encoder(n, "NanoChatForCausalLM", "NanoChatConfig"),
    IN_DOUBT: lambda n: (FunctionalNorms(n), IDS),
}


def loss(model: nn.Module, batch: Any) -> Tensor:
    """The model's own, or that of its output against random numbers."""
    given = batch if isinstance(batch, (tuple, list)) else (batch,)
    out = model(**batch) if isinstance(batch, dict) else model(*given)
    if isinstance(out, Tensor):
        target = torch.randn(out.shape[1:], generator=torch.Generator().manual_seed(5))
        return (out - target).square().mean()
    return out.loss


def read(name: str, layers: int) -> dict[str, Any]:
    """A class: what was found in it, and the seconds that reading and a cheap diagnosis take."""
    torch.manual_seed(0)
    model, batch = CLASSES[name](layers)
    begun = time.process_time()
    structure = read_structure(model, batch)
    seconds = time.process_time() - begun
    begun = time.process_time()
    found = diagnose(model, batch, loss=loss, preset="cheap")
    seconds_of_cheap = time.process_time() - begun
    planned = diagnose(model, batch, loss=loss, lr=LR, warmup_steps=WARMUP, preset="standard")
    return {
        "name": name,
        "class": f"{type(model).__module__.partition('.')[0]}.{type(model).__name__}",
        "layers": layers,
        "stacks": [
            {
                "stack": stack.name,
                "layers": stack.sublayers[-1].layer + 1,
                "sublayers": len(stack.sublayers),
                "roles": list(dict.fromkeys(view.role for view in stack.sublayers)),
                "placements": sorted({view.placement for view in stack.sublayers}),
                "relation": stack.sublayers[-1].relation,
                "final_norm": stack.final_norm,
            }
            for stack in structure.stacks
        ],
        "unread": list(structure.unread),
        "not_done": [f.sentence for f in found.findings if f.name == "not_done"],
        "verdict": planned.verdict,
        "more": [
            f"{f.severity}: {f.sentence}" for f in planned.at_least("warning") if f is not planned.cause
        ],
        "read_seconds": round(seconds, 2),
        "cheap_seconds": round(seconds_of_cheap, 2),
    }


def deep(make: Callable[..., Case], layers: int, std: float) -> dict[str, Any]:
    """All findings of the preset ``standard``."""
    torch.manual_seed(0)
    model, batch = make(layers, initializer_range=std)
    begun = time.process_time()
    found: Diagnosis = diagnose(model, batch, loss=loss, lr=LR, preset="standard")
    return {
        "name": type(model).__name__,
        "std": std,
        "layers": layers,
        "seconds": round(time.process_time() - begun, 1),
        "parameters": found.facts["parameters"],
        "findings": [
            {"name": f.name, "severity": f.severity, "sentence": f.sentence, "reference": f.reference}
            for f in found.findings
        ],
    }


def kept() -> dict[str, Any]:
    """What was measured last."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def page() -> str:
    """The page of what was kept."""
    measured = kept()
    return "\n".join([*_head(measured), *_classes(measured["classes"]), *_findings(measured["deep"]), ""])


def _head(measured: dict[str, Any]) -> list[str]:
    about = (
        "This page shows what `normlab.diagnose(model, batch)` reads in the models of other libraries, and "
        "what it says of them. It finds the repeated blocks of these classes and the sums in them by itself: "
        "no name is given, and none of their code is changed. All have random weights from their own "
        f"constructors, a width of {DIM}, {HEADS} heads, a feed-forward width of {FFN} and a vocabulary of "
        f"{VOCAB}; they see {ROWS} x {LENGTH} random tokens (a ViT sees {ROWS} images of 64 patches). "
        f"Measured on {measured['about']}; `python benchmarks/foreign.py --write` measures them again."
    )
    return ["# Other people's models", "", about, ""]


SECONDS = (
    "The seconds are for reading the structure and for a whole diagnosis with the preset `cheap`: processor "
    "time on one thread, of one run each."
)
FUNCTIONS = (
    "`FunctionalNorms` is a decoder of the benchmark itself. It computes its norms by functions, as "
    "nanochat's published code does (in transformers they are modules). Its sublayers are found, but their "
    "placement is left in doubt: {relation}."
)
SAID = (
    f"This is the preset `standard`, at a learning rate of {LR:g} with a declared warm-up of {WARMUP:,} "
    "steps. The terminal, the page and the Python object begin with the first line."
)


def _classes(rows: Iterable[dict[str, Any]]) -> list[str]:
    rows = list(rows)
    lines = [
        f"## What is read, at {rows[0]['layers']} layers a stack",
        "",
        SECONDS,
        "",
        "| class | stack | layers | sublayers of a layer | placement read | final norm | read | cheap |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        for i, stack in enumerate(row["stacks"]):
            own = (f"`{row['class']}`", f"{row['read_seconds']} s", f"{row['cheap_seconds']} s")
            title, *seconds = own if not i else ("", "", "")
            roles = ", ".join(stack["roles"]).replace("_", "-")
            placement = ", ".join(stack["placements"])
            final = f"`{stack['final_norm']}`" if stack["final_norm"] else "none"
            lines.append(
                f"| {title} | `{stack['stack']}` | {stack['layers']} | {roles} | {placement} | {final} | "
                f"{seconds[0]} | {seconds[1]} |"
            )
    unread = [f"- `{row['class']}`: {why}" for row in rows for why in row["unread"] + row["not_done"]]
    doubt = [
        FUNCTIONS.format(relation=row["stacks"][0]["relation"]) for row in rows if row["name"] == IN_DOUBT
    ]
    said = [
        f"| `{row['class']}` | {_cell(row['verdict'])} | {_cell('<br>'.join(row['more'])) or 'none'} |"
        for row in rows
    ]
    return [
        *lines,
        "",
        *doubt,
        "",
        *(["What was not read or not measured:", "", *unread, ""] if unread else []),
        "## What is said first",
        "",
        SAID,
        "",
        "| class | first line | further warnings |",
        "| --- | --- | --- |",
        *said,
        "",
    ]


def _cell(sentence: str) -> str:
    return sentence.replace("|", "∣")


READING = (
    f"The learning rate is {LR:g}, without a warm-up. Theory assumes a Xavier start, which at this width "
    f"draws a square matrix with a standard deviation of {STARTS[1]:g}; BERT's and GPT-2's own is "
    f"{STARTS[0]:g}, made for widths of 768 and more."
)


def _findings(rows: list[dict[str, Any]]) -> list[str]:
    """The severities side by side, then the sentences of each finding, a model a line."""
    names = list(dict.fromkeys(f["name"] for row in rows for f in row["findings"]))
    titles = [f"`{row['name']}`, {row['std']:g}" for row in rows]
    lines = [
        f"## BERT and GPT-2 with {rows[0]['layers']} layers side by side: findings of `standard`",
        "",
        READING,
        "",
        f"| model, deviation of its weights | {' | '.join(titles)} |",
        f"| --- |{' --- |' * len(rows)}",
        f"| parameters | {' | '.join(row['parameters'] for row in rows)} |",
        f"| seconds of processor time | {' | '.join(str(row['seconds']) for row in rows)} |",
    ]
    for name in names:
        kinds = [" and ".join(f["severity"] for f in row["findings"] if f["name"] == name) for row in rows]
        lines.append(f"| `{name}` | {' | '.join(kind or 'not found' for kind in kinds)} |")
    for name in names:
        said = [
            f"- {title}, *{f['severity']}*: {f['sentence']}."
            for title, row in zip(titles, rows, strict=True)
            for f in row["findings"]
            if f["name"] == name
        ]
        lines += ["", f"### `{name}`", "", *said]
    return lines


def main() -> None:
    """Measure, print, and keep what was asked for."""
    parser = argparse.ArgumentParser(description="Other people's classes, diagnosed.")
    parser.add_argument("--write", action="store_true", help="all depths, kept in foreign.json")
    parser.add_argument("--page", action="store_true", help="write docs/foreign-models.md and no more")
    args = parser.parse_args()
    tf.logging.set_verbosity_error()
    if not args.page:
        classes = []
        for name in CLASSES:
            classes.append(read(name, LAYERS if args.write else 2))
            print(json.dumps(classes[-1], ensure_ascii=False), flush=True)
        if args.write:
            found = [deep(make, DEEP, std) for std in STARTS[::-1] for make in (bert, gpt2)]
            about = f"{hardware(torch.device('cpu'))}, transformers {tf.__version__}"
            content = {"about": about, "classes": classes, "deep": found}
            RESULTS.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    if args.write or args.page:
        PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
