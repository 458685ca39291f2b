"""TRL's RewardTrainer: a scalar head that ranks a chosen above a rejected answer."""

import random

import torch
from datasets import Dataset
from small import sentence, words
from transformers import LlamaConfig, LlamaForSequenceClassification
from trl import RewardConfig, RewardTrainer

draw = random.Random(0)
pairs = []
for _ in range(200):
    pairs.append({"chosen": sentence(draw, 3, 12), "rejected": sentence(draw, 3, 12)})

torch.manual_seed(0)
model = LlamaForSequenceClassification(
    LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        num_labels=1,
    )
)
arguments = RewardConfig(
    output_dir="out",
    use_cpu=True,
    bf16=False,
    report_to="none",
    save_strategy="no",
    max_length=64,
    per_device_train_batch_size=4,
    max_steps=20,
    learning_rate=1e-4,
    gradient_checkpointing=False,
)
data = Dataset.from_list(pairs)
trainer = RewardTrainer(model=model, args=arguments, train_dataset=data, processing_class=words())
trainer.train()
