"""TRL's DPOTrainer: a policy and a frozen reference on pairs of a chosen and a rejected answer."""

import random

import torch
from datasets import Dataset
from small import llama, sentence, words
from trl import DPOConfig, DPOTrainer

draw = random.Random(0)
pairs = []
for _ in range(200):
    pairs.append(
        {
            "prompt": sentence(draw, 3, 6) + " ",
            "chosen": sentence(draw, 3, 8),
            "rejected": sentence(draw, 3, 8),
        }
    )

torch.manual_seed(0)
model = llama()
reference = llama()
reference.load_state_dict(model.state_dict())
arguments = DPOConfig(
    output_dir="out",
    use_cpu=True,
    bf16=False,
    report_to="none",
    save_strategy="no",
    beta=0.1,
    max_length=64,
    per_device_train_batch_size=4,
    max_steps=20,
    learning_rate=1e-4,
    gradient_checkpointing=False,
)
data = Dataset.from_list(pairs)
trainer = DPOTrainer(
    model=model, ref_model=reference, args=arguments, train_dataset=data, processing_class=words()
)
trainer.train()
