"""What models are trained for: each task's batches, loss and scores.

Your own task is registered when the module with its class is imported.
"""

from normlab.lab.tasks.bert import BertPretraining
from normlab.lab.tasks.classification import Classification
from normlab.lab.tasks.language_model import LanguageModel
from normlab.lab.tasks.task import Task
from normlab.lab.tasks.translation import Translation

TASKS = Task.registry

__all__ = ["TASKS", "BertPretraining", "Classification", "LanguageModel", "Translation"]
