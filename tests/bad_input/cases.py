"""Mistakes on the command line and in files, and what each answer must hold, with ``|`` between the facts."""

from __future__ import annotations

TINY = (
    "--steps 4 --validate-every-steps 2 --dim 16 --ffn-dim 32 --heads 2 --encoder-layers 1 "
    "--decoder-layers 1 --max-tokens 512 --precision fp32 --threads 1 --vocab-size 100"
).split()
TRAIN_ANEW = "normlab train --config {run}.aside/config.json --out runs"

SIZES = {
    "heads that do not divide": ("--heads 3", "3 heads | 16 | [1, 2, 4, 8]"),
    "kv heads that do not divide": ("--heads 4 --kv-heads 3", "3 | kv_heads | divide | [1, 2, 4]"),
    "odd width": ("--dim 15 --heads 3", "sinusoidal | even width | 15 | 16"),
    "odd heads under rope": ("--dim 6 --recipe pre+rope", "rope | even width | 3 | 6 wide | 2 heads | [1]"),
    "width 0": ("--dim 0", "dim | at least 1 | got 0"),
    "width -1": ("--dim -1", "dim | at least 1 | got -1"),
    "an endless width": (f"--dim {10**20}", "dim | below 9,223,372,036,854,775,808 | got 100000"),
    "no encoder": ("--encoder-layers 0", "encoder_layers | 0 | --encoder-layers 1"),
    "dropout 1.5": ("--dropout 1.5", "dropout | below 1 | got 1.5"),
    "steps 0": ("--steps 0", "steps | at least 1 | got 0"),
    "max_tokens 0": ("--max-tokens 0", "max_tokens | at least 1 | got 0"),
    "max_len 1": ("--max-len 1", "max_len | at least 2 | got 1"),
    "threads -1": ("--threads -1", "threads | at least 0 | got -1"),
    "vocabulary of 3": ("--vocab-size 3", "vocab_size | at least 5 | got 3"),
    "vocabulary below the characters": ("--vocab-size 10", "vocab_size | 10 | 33"),
}
RATES = {
    "lr 0": ("--lr 0", "lr | above 0 | got 0.0"),
    "lr -1": ("--lr -1", "lr | above 0 | got -1.0"),
    "lr nan": ("--lr nan", "lr | finite | got nan"),
    "lr inf": ("--lr inf", "lr | finite | got inf"),
    "clip nan": ("--max-grad-norm nan", "max_grad_norm | at least 0 | got nan"),
    "smoothing 1": ("--label-smoothing 1", "label_smoothing | below 1 | got 1.0"),
    "weight decay -1": ("--weight-decay -1", "weight_decay | at least 0 | got -1.0"),
    "warm-up -4": ("--warmup-steps -4", "warmup_steps | at least 0 | got -4"),
    "warm-up of no steps": (
        "--recipe pre+warmup --warmup-steps 0",
        "recipe | 'pre+warmup' | optim.warmup_steps | --warmup-steps 400",
    ),
}
NAMES = {
    "unknown recipe": (
        "--recipe pree",
        "recipe 'pree' | enc:A/dec:B | did you mean 'pre' | admin | rezero_post | --import my_package",
    ),
    "unknown optimizer": (
        "--recipe pre+adamm",
        "recipe 'pre+adamm' | 'adamm' | did you mean 'adam' | rmsnorm | xavier_uniform | --import my_package",
    ),
    "unknown device": ("--device gpu", "'gpu' | cpu | cuda | cuda:1"),
    "a device that holds no numbers": ("--device meta", "'meta' | cpu | cuda | cuda:1"),
    "no such configuration file": ("--config nope.json", "nope.json | config.json"),
    "no such configuration": (
        "--config dmo",
        "'dmo' | did you mean 'demo' | gl_en_small | language_model | --config runs/<id>/config.json",
    ),
    "a folder without a name": ("--out=", "--out | empty | --out ."),
    "a variable in single quotes": ("--out $HOME/runs", "--out | '$HOME/runs' | shell | './$HOME/runs'"),
    "a home that the shell leaves alone": ("--out=~/runs", "--out | '~/runs' | after = | './~/runs'"),
    "another CPU": ("--device cpu:7", "'cpu:7' | cpu | cuda"),
    "a device as a configuration": ("--config /dev/null", "'/dev/null' | not a regular file | config.json"),
    "a folder as a configuration": ("--config ./", "'./' | not a regular file | config.json"),
    "a tokenizer without a name": ("--tokenizer=", "tokenizer is empty | --tokenizer bpe"),
    "a module above": ("--import ..x", "'..x' | name of a module | my_package"),
    "an endless recipe": (f"--recipe pre{'+pre' * 200}", "pre+pre | … | 803 characters | --import"),
    "a seed below 0": ("--seed -1", "seed | at least 0 | got -1"),
    "an endless seed": (f"--seed {10**30}", "seed | below 2**63 | got 1000"),
    "a file where the runs should be": (
        "--out train_src.txt",
        "Not a directory | 'train_src.txt/data' | folder",
    ),
}
TYPED = SIZES | RATES | NAMES
"""Flags of `normlab train` after those of a good run."""

COMPARED = {
    "a recipe twice": ("--recipes pre pre", "recipes | pre twice"),
    "a recipe twice under two names": ("--recipes pre pre+layernorm", "'pre' | 'pre+layernorm' | same"),
    "no recipe": ("--recipes", "at least one | recipes | got none"),
    "a learning rate of nan": ("--lrs nan", "lrs | finite | got nan"),
    "jobs -1": ("--jobs -1", "jobs | at least 0 | got -1"),
    "heads in a comparison": ("--recipes pre --heads 3", "3 heads | 16 | [1, 2, 4, 8]"),
}

UNPARSED = {
    "a flag misspelt": ("--drpout 0.1", "Unrecognized | --drpout | 0.1"),
    "a word for a number": ("--lr fast", "--lr | 'fast'"),
    "a fraction of a step": ("--steps 1.5", "--steps | '1.5'"),
    "unknown precision": (
        "--precision fp8",
        "invalid | 'fp8' | '--precision' | 'auto' | 'fp32' | 'bf16' | 'fp16'",
    ),
}

LONG = " ".join(["zehn"] * 60)
TEXTS = {
    "different length": ({"a": "eins\nzwei\n"}, "--train-tgt a", "train_src.txt | 300 lines | a has 2"),
    "empty file": ({"a": ""}, "--train-src a", "a is empty | one sentence a line"),
    "empty lines in training": (
        {"a": "\n" * 300},
        "--train-tgt a",
        "none | 300 | empty side | give text with words",
    ),
    "empty lines on dev": ({"a": " \n" * 30}, "--dev-src a", "30 lines of a | empty"),
    "empty lines in the test": ({"a": "\n" * 30}, "--test-tgt a", "30 lines of a | empty"),
    "no UTF-8": ({"a": b"gut\nsch\xf6n\n"}, "--dev-src a", "a, line 2 | byte 0xf6 | UTF-8 | iconv"),
    "no archive": ({"a.gz": "eins\n"}, "--train-src a.gz", "a.gz | unpacked as .gz"),
    "a folder": ({}, "--train-src .", "folder | .gz | .xz"),
    "no file": ({}, "--train-src none", "no text file none"),
    "longer than max_len": ({}, "--max-len 2", "none | 300 | longer than max_len | --max-len"),
    "longer than any batch": (
        {},
        "--max-tokens 8",
        "24 + 31 | --max-tokens 8 | --max-tokens 55 | --max-len 4",
    ),
    "longer than the learned positions, in training": (
        {},
        "--recipe pre+learned --max-positions 5",
        "training | 32 | 5 positions | --max-positions 32 | --max-len 5",
    ),
    "longer than the learned positions, on dev": (
        {"a": "zehn\n" * 16 + LONG + "\n" + "zehn\n" * 13},
        "--recipe pre+learned --max-positions 50 --dev-src a",
        "a, line 17 | 301 | 50 | --max-positions 301",
    ),
    "longer than the learned positions, in the test": (
        {"a": LONG + "\n" + "zehn\n" * 29},
        "--recipe pre+learned --max-positions 50 --test-src a",
        "a, line 1 | 301 | 50 | --max-positions 301",
    ),
}
"""Files that are written, flags after those of a good run, and the sentence."""

CONFIGS = {
    "an empty file": ("", "c.json | not JSON | line 1 | column 1"),
    "cut off": ('{"recipe": "pre"', "c.json | not JSON | ',' | line 1 | column 17"),
    "a list": ("[]", "c.json | an object | []"),
    "null": ("null", "c.json | an object | got None"),
    "no UTF-8": (b"\xff{", "c.json | UTF-8 | byte 0"),
    "an unknown key": ('{"modle": {}}', "c.json | unknown | 'modle' | did you mean | 'model'"),
    "an unknown key inside": (
        '{"model": {"dmi": 3}}',
        "c.json | unknown | 'model.dmi' | did you mean | 'dim'",
    ),
    "a key twice": ('{"recipe": "pre", "recipe": "post"}', "c.json | not JSON | 'recipe' | twice"),
    "text for a number": ('{"train": {"steps": "12"}}', "c.json | train.steps | a whole number | '12'"),
    "a list for a number": ('{"optim": {"lr": [1]}}', "c.json | optim.lr | a number | [1]"),
    "a number for a section": ('{"model": 3}', "c.json | an object | got 3"),
    "nan": ('{"optim": {"lr": NaN}}', "c.json | optim.lr | finite | got nan"),
    "too large for a number": (
        '{"optim": {"lr": 1' + "0" * 400 + "}}",
        "c.json | optim.lr | finite | got 1000000",
    ),
    "half a surrogate pair": ('{"recipe": "\\ud800"}', "c.json | surrogate pairs | '\\ud800'"),
    "thousands deep": ("[" * 100_000, "c.json | not JSON | deep"),
    "an unknown optimizer": (
        '{"optim": {"optimiser": "adamm"}}',
        "unknown optimizer 'adamm' | did you mean 'adam' | sgd | --import my_package",
    ),
    "an unknown task": (
        '{"task": "translaton"}',
        "unknown task 'translaton' | did you mean 'translation' | language_model",
    ),
    "an unknown word": (
        '{"machine": {"probes": "lots"}}',
        "c.json | machine.probes | 'cheap', 'standard' or 'full' | 'lots'",
    ),
}
"""What c.json holds, and what `normlab train --config c.json` says."""
