"""TRL's SFTTrainer with packing: several documents in a row, kept apart by their positions."""

import torch
from datasets import Dataset
from small import llama, rows_of_tokens, words
from trl import SFTConfig, SFTTrainer

torch.manual_seed(0)
model = llama(tie_word_embeddings=True)
arguments = SFTConfig(
    output_dir="out",
    use_cpu=True,
    bf16=False,
    report_to="none",
    save_strategy="no",
    packing=True,
    max_length=32,
    per_device_train_batch_size=4,
    max_steps=20,
    learning_rate=3e-4,
    gradient_checkpointing=False,
)
data = Dataset.from_list([{"input_ids": row} for row in rows_of_tokens(400, 6, 14)])
trainer = SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=words())
trainer.train()
