"""A transformers.Trainer that saves at every step, and its model at the end."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def make_trainer(folder, steps=6):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=64, **sizes))
    ids = torch.randint(1, 64, (64, 16))
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=4,
        max_steps=steps,
        save_steps=1,
        save_total_limit=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    return Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row.clone()} for row in ids])


if __name__ == "__main__":
    trainer = make_trainer(sys.argv[1])
    trainer.train()
    trainer.save_model(f"{sys.argv[1]}/final")
    trainer.save_state()
