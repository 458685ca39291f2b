"""What people type and what files hold, each with the exact sentence that answers it."""

from __future__ import annotations

from normlab.nn import Placement
from normlab.optim import OPTIMISERS
from normlab.recipes.grammar import PLACEMENT, parts
from normlab.recipes.plugins import HINT
from normlab.tasks.registry import TASKS

TINY = (
    "--steps 4 --validate-every-steps 2 --dim 16 --ffn-dim 32 --heads 2 --encoder-layers 1 "
    "--decoder-layers 1 --max-tokens 512 --precision fp32 --threads 1 --vocab-size 100"
).split()
TRAIN_ANEW = (
    "to train it anew: mv {run} {run}.aside && normlab train --config {run}.aside/config.json --out runs"
)
BRING_BACK = "bring back the config.json and tokenizer.json that it was trained with"
MEND = "; mend or delete it"
_PLACEMENTS = ", ".join(Placement.registry)
_OTHERS = ", ".join(part.name for part in parts() if part.axis != PLACEMENT.name)
_FIELDS = "an object, the fields of Config, got"

SIZES = {
    "heads that do not divide": (
        "--heads 3",
        "3 heads do not divide the width 16; heads that do: [1, 2, 4, 8]",
    ),
    "kv heads that do not divide": (
        "--heads 4 --kv-heads 3",
        "3 kv_heads do not divide the 4 heads; those that do: [1, 2, 4]",
    ),
    "odd width": ("--dim 15 --heads 3", "sinusoidal positions need an even width, got 15; try 16"),
    "odd heads under rope": (
        "--dim 6 --recipe pre+rope",
        (
            "rope turns pairs, so heads need an even width, got 3 (6 wide, 2 heads); fewer "
            "heads that have one: [1]"
        ),
    ),
    "width 0": ("--dim 0", "dim is at least 1, got 0"),
    "width -1": ("--dim -1", "dim is at least 1, got -1"),
    "an endless width": (f"--dim {10**20}", "dim is below 9,223,372,036,854,775,808, got more"),
    "no encoder": (
        "--encoder-layers 0",
        (
            "encoder_layers is 0, and a model of the task translation has encoder and decoder; "
            "type at least --encoder-layers 1"
        ),
    ),
    "dropout 1.5": ("--dropout 1.5", "dropout is at least 0 and below 1, got 1.5"),
    "steps 0": ("--steps 0", "steps is at least 1, got 0"),
    "max_tokens 0": ("--max-tokens 0", "max_tokens is at least 1, got 0"),
    "max_len 1": ("--max-len 1", "max_len is at least 2, got 1"),
    "threads -1": ("--threads -1", "threads is at least 0, got -1"),
    "vocabulary of 3": ("--vocab-size 3", "vocab_size is at least 5, got 3"),
    "vocabulary below the characters": (
        "--vocab-size 10",
        (
            "vocab_size is 10, but the text's different characters and the 4 special "
            "tokens are 33 already; "
            "pass at least 33"
        ),
    ),
}
RATES = {
    "lr 0": ("--lr 0", "lr is above 0, got 0.0"),
    "lr -1": ("--lr -1", "lr is above 0, got -1.0"),
    "lr nan": ("--lr nan", "lr is above 0, got nan"),
    "lr inf": ("--lr inf", "lr is above 0 and finite, got inf"),
    "clip nan": ("--max-grad-norm nan", "max_grad_norm is at least 0, got nan"),
    "smoothing 1": ("--label-smoothing 1", "label_smoothing is at least 0 and below 1, got 1.0"),
    "weight decay -1": ("--weight-decay -1", "weight_decay is at least 0, got -1.0"),
    "warm-up -4": ("--warmup-steps -4", "warmup_steps is at least 0, got -4"),
    "warm-up of no steps": (
        "--recipe pre+warmup --warmup-steps 0",
        (
            "recipe 'pre+warmup' warms up, and optim.warmup_steps is 0; type e.g. "
            "--warmup-steps 400, or in "
            "Python give a base with OptimConfig(warmup_steps=400)"
        ),
    ),
}
NAMES = {
    "unknown recipe": (
        "--recipe pree",
        (
            "recipe 'pree' begins with a placement or enc:A/dec:B; 'pree' is not one, "
            "did you mean 'pre'? "
            f"(allowed: {_PLACEMENTS}); {HINT}"
        ),
    ),
    "unknown optimiser": (
        "--recipe pre+adamm",
        f"recipe 'pre+adamm': unknown part 'adamm', did you mean 'adam'? (allowed: {_OTHERS}); {HINT}",
    ),
    "unknown device": ("--device gpu", "there is no device 'gpu'; use cpu, cuda or cuda:1"),
    "a device that holds no numbers": ("--device meta", "there is no device 'meta'; use cpu, cuda or cuda:1"),
    "no such configuration file": (
        "--config nope.json",
        "there is no file nope.json; `normlab runs` lists the runs, each with a config.json",
    ),
    "no such configuration": (
        "--config dmo",
        (
            "no configuration is called 'dmo', did you mean 'demo'? there are demo, "
            "gl_en, gl_en_small, language_model, multi30k, "
            "multi30k_small, text, or give a file: --config runs/<id>/config.json"
        ),
    ),
    "a file where the runs should be": (
        "--out train_src.txt",
        "Not a directory: 'train_src.txt/data'; a part of that path is a file; name another folder",
    ),
}
TYPED = SIZES | RATES | NAMES
"""Flags of `normlab train` after those of a good run."""

COMPARED = {
    "a recipe twice": ("--recipes pre pre", "recipes hold pre twice; name each once"),
    "a recipe twice under two names": (
        "--recipes pre pre+layernorm",
        "the recipes 'pre' and 'pre+layernorm' are the same; keep one of them",
    ),
    "no recipe": ("--recipes", "a comparison needs at least one of recipes, got none"),
    "a learning rate of nan": ("--lrs nan", "lrs is above 0, got nan"),
    "jobs -1": ("--jobs -1", "jobs is at least 0, got -1"),
    "heads in a comparison": (
        "--recipes pre --heads 3",
        "3 heads do not divide the width 16; heads that do: [1, 2, 4, 8]",
    ),
}

UNPARSED = {
    "a flag misspelt": ("--drpout 0.1", "Unrecognized options: --drpout, 0.1"),
    "a word for a number": ("--lr fast", "Error parsing --lr: could not convert string to float: 'fast'"),
    "a fraction of a step": (
        "--steps 1.5",
        "Error parsing --steps: invalid literal for int() with base 10: '1.5'",
    ),
    "unknown precision": (
        "--precision fp8",
        "invalid choice 'fp8' for argument '--precision'. Expected one of ('auto', 'fp32', 'bf16', 'fp16').",
    ),
}

LONG = " ".join(["zehn"] * 60)
TEXTS = {
    "different length": (
        {"a": "eins\nzwei\n"},
        "--train-tgt a",
        (
            "train_src.txt has 300 lines but a has 2; line n of one must be the translation "
            "of line n of the other"
        ),
    ),
    "empty file": ({"a": ""}, "--train-src a", "a is empty; pass a file with one sentence a line"),
    "empty lines in training": (
        {"a": "\n" * 300},
        "--train-tgt a",
        (
            "none of the 300 training pairs is left: 300 have an empty side, 0 are longer than max_len; "
            "give text with words"
        ),
    ),
    "empty lines on dev": (
        {"a": " \n" * 30},
        "--dev-src a",
        "all 30 lines of a are empty; give text with words",
    ),
    "empty lines in the test": (
        {"a": "\n" * 30},
        "--test-tgt a",
        "all 30 lines of a are empty; give text with words",
    ),
    "no UTF-8": (
        {"a": b"gut\nsch\xf6n\n"},
        "--dev-src a",
        "a, line 2: byte 0xf6 is not UTF-8; convert the file, for example with iconv -f latin1 -t utf-8",
    ),
    "no archive": (
        {"a.gz": "eins\n"},
        "--train-src a.gz",
        "a.gz cannot be unpacked as .gz (Not a gzipped file (b'ei')); pack it again",
    ),
    "a folder": ({}, "--train-src .", ". is a folder; pass a text file, plain, .gz or .xz"),
    "no file": (
        {},
        "--train-src none",
        "there is no text file none; pass the path of an existing one",
    ),
    "longer than max_len": (
        {},
        "--max-len 2",
        (
            "none of the 300 training pairs is left: 0 have an empty side, 300 are longer than max_len; "
            "type a larger --max-len than 2"
        ),
    ),
    "longer than any batch": (
        {},
        "--max-tokens 8",
        (
            "the longest training pair has 24 + 31 positions, and a batch --max-tokens "
            "8; type --max-tokens 55, "
            "or leave such pairs out with --max-len 4"
        ),
    ),
    "longer than the learned positions, in training": (
        {},
        "--recipe pre+learned --max-positions 5",
        (
            "the longest training sentence has 32 positions, and the model has learned positions for 5; "
            "type --max-positions 32, or leave longer ones out: --max-len 5"
        ),
    ),
    "longer than the learned positions, on dev": (
        {"a": "zehn\n" * 16 + LONG + "\n" + "zehn\n" * 13},
        "--recipe pre+learned --max-positions 50 --dev-src a",
        (
            "a, line 17 has 301 positions, and the model has learned positions for 50; "
            "type --max-positions 301, "
            "or shorten the line"
        ),
    ),
    "longer than the learned positions, in the test": (
        {"a": LONG + "\n" + "zehn\n" * 29},
        "--recipe pre+learned --max-positions 50 --test-src a",
        (
            "a, line 1 has 301 positions, and the model has learned positions for 50; "
            "type --max-positions 301, "
            "or shorten the line"
        ),
    ),
}
"""Files that are written, flags after those of a good run, and the sentence."""

CONFIGS = {
    "an empty file": ("", f"c.json is not JSON: Expecting value in line 1, column 1{MEND}"),
    "cut off": (
        '{"recipe": "pre"',
        f"c.json is not JSON: Expecting ',' delimiter in line 1, column 17{MEND}",
    ),
    "a list": ("[]", f"c.json: the whole must be {_FIELDS} []"),
    "null": ("null", f"c.json: the whole must be {_FIELDS} null"),
    "no UTF-8": (b"\xff{", f"c.json is not UTF-8 text: byte 0{MEND}"),
    "an unknown key": ('{"modle": {}}', "c.json: unknown key 'modle'; did you mean 'model'?"),
    "an unknown key inside": (
        '{"model": {"dmi": 3}}',
        "c.json: unknown key 'model.dmi'; did you mean 'dim'?",
    ),
    "a key twice": (
        '{"recipe": "pre", "recipe": "post"}',
        f"c.json is not JSON: the key 'recipe' stands twice in one object, keep one of them{MEND}",
    ),
    "text for a number": (
        '{"train": {"steps": "12"}}',
        'c.json: train.steps must be a whole number, got "12"',
    ),
    "a list for a number": ('{"optim": {"lr": [1]}}', "c.json: optim.lr must be a number, got [1]"),
    "a number for a section": (
        '{"model": 3}',
        "c.json: model must be an object, the fields of ModelConfig, got 3",
    ),
    "nan": ('{"optim": {"lr": NaN}}', "c.json: optim: lr is above 0, got nan"),
    "too large for a number": (
        '{"optim": {"lr": 1' + "0" * 400 + "}}",
        f"c.json: optim.lr must be a number below 1.8e308, got 1{'0' * 56}...",
    ),
    "half a surrogate pair": (
        '{"recipe": "\\ud800"}',
        'c.json: recipe must be text without halves of surrogate pairs, got "\\ud800"',
    ),
    "thousands deep": (
        "[" * 100_000,
        f"c.json is not JSON: lists or objects inside one another, thousands deep{MEND}",
    ),
    "an unknown optimiser": (
        '{"optim": {"optimiser": "adamm"}}',
        f"unknown optimiser 'adamm', did you mean 'adam'? (allowed: {', '.join(OPTIMISERS)}); {HINT}",
    ),
    "an unknown task": (
        '{"task": "translaton"}',
        f"unknown task 'translaton', did you mean 'translation'? (allowed: {', '.join(TASKS)})",
    ),
    "an unknown word": (
        '{"machine": {"probes": "lots"}}',
        "c.json: machine: probes is one of '', cheap, standard, full, got 'lots'",
    ),
}
"""What c.json holds, and what `normlab train --config c.json` says."""
