"""What models are trained for: each task's batches, loss and scores.

Your own task is registered when the module with its class is imported.
"""

from normlab.tasks.bert import BertPretraining
from normlab.tasks.classification import Classification
from normlab.tasks.language_model import LanguageModel
from normlab.tasks.task import Task
from normlab.tasks.translation import Translation

TASKS = Task.registry

__all__ = ["TASKS", "BertPretraining", "Classification", "LanguageModel", "Translation"]
