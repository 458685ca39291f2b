"""No file outside the tasks, the papers and what reproduces them knows a metric by name."""

from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "normlab"
HOMES = ("lab/tasks/", "papers/")
EXCEPTIONS = {
    "base/extras.py": "the package sacrebleu, which an extra brings",
    "cli/translate.py": "the command `normlab run score` is sacreBLEU at the prompt",
    "lab/training/log.py": "a log records the version of the package sacrebleu",
}


def test_only_tasks_know_the_metric_of_translation():
    naming = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file()
        and path.suffix in (".py", ".j2", ".css", ".js")
        and "bleu" in path.read_text(encoding="utf-8").lower()
    }
    outside = {name for name in naming if not name.startswith(HOMES)}
    assert outside == set(EXCEPTIONS)
