"""transformers' Trainer: rows of several lengths, two micro-batches a step, a cosine schedule."""

import torch
from datasets import Dataset
from small import PAD, llama, rows_of_tokens
from transformers import Trainer, TrainingArguments


def collate(rows):
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.full((len(rows), width), PAD)
    mask = torch.zeros_like(ids)
    labels = torch.full((len(rows), width), -100)
    for index, row in enumerate(rows):
        length = len(row["input_ids"])
        ids[index, :length] = torch.tensor(row["input_ids"])
        mask[index, :length] = 1
        labels[index, :length] = ids[index, :length]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


torch.manual_seed(0)
model = llama()
arguments = TrainingArguments(
    output_dir="out",
    use_cpu=True,
    report_to="none",
    save_strategy="no",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    max_steps=20,
    warmup_steps=2,
    lr_scheduler_type="cosine",
    learning_rate=3e-4,
    weight_decay=0.1,
)
data = Dataset.from_list([{"input_ids": row} for row in rows_of_tokens(200, 6, 14)])
trainer = Trainer(model=model, args=arguments, train_dataset=data, data_collator=collate)
trainer.train()
