"""TRL's DistillationTrainer: a student learns a teacher's probabilities of answers that it has sampled."""

import random

import torch
from datasets import Dataset
from small import llama, sentence, words
from trl import DistillationConfig, DistillationTrainer

draw = random.Random(0)
prompts = [{"prompt": sentence(draw, 3, 6) + " "} for _ in range(200)]

torch.manual_seed(0)
student = llama()
teacher = llama()
arguments = DistillationConfig(
    output_dir="out",
    use_cpu=True,
    bf16=False,
    report_to="none",
    save_strategy="no",
    max_completion_length=8,
    per_device_train_batch_size=4,
    max_steps=20,
    learning_rate=1e-4,
    gradient_checkpointing=False,
)
data = Dataset.from_list(prompts)
trainer = DistillationTrainer(
    model=student, teacher_model=teacher, args=arguments, train_dataset=data, processing_class=words()
)
trainer.train()
