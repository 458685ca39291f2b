"""TRL's GRPOTrainer: groups of sampled answers, adapters, and a divergence from the model without them."""

import random

import torch
from datasets import Dataset
from peft import LoraConfig
from small import llama, sentence, words
from trl import GRPOConfig, GRPOTrainer

draw = random.Random(0)
prompts = [{"prompt": sentence(draw, 3, 6) + " "} for _ in range(200)]


def odd_words(completions, **_):
    """A reward: how many words of an answer are odd."""
    return [sum(int(word[1:]) % 2 for word in text.split() if word[1:].isdigit()) for text in completions]


torch.manual_seed(0)
model = llama()
adapters = LoraConfig(
    r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
)
arguments = GRPOConfig(
    output_dir="out",
    use_cpu=True,
    bf16=False,
    report_to="none",
    save_strategy="no",
    beta=0.04,
    num_generations=4,
    num_iterations=2,
    max_completion_length=8,
    per_device_train_batch_size=8,
    max_steps=20,
    learning_rate=1e-4,
    gradient_checkpointing=False,
)
data = Dataset.from_list(prompts)
trainer = GRPOTrainer(
    model=model,
    reward_funcs=odd_words,
    args=arguments,
    train_dataset=data,
    processing_class=words(),
    peft_config=adapters,
)
trainer.train()
