"""TRL's SFTTrainer on conversations, whose loss counts what the assistant says and nothing else."""

import random

import torch
from datasets import Dataset
from small import llama, sentence, words
from trl import SFTConfig, SFTTrainer

TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + ' </s> ' }}{% endgeneration %}"
    "{% else %}{{ '<s> ' + message['content'] + ' ' }}{% endif %}{% endfor %}"
)

draw = random.Random(0)
conversations = []
for _ in range(200):
    question = {"role": "user", "content": sentence(draw, 3, 6)}
    answer = {"role": "assistant", "content": sentence(draw, 3, 8)}
    conversations.append({"messages": [question, answer]})

torch.manual_seed(0)
model = llama()
tokenizer = words()
tokenizer.chat_template = TEMPLATE
arguments = SFTConfig(
    output_dir="out",
    use_cpu=True,
    bf16=False,
    report_to="none",
    save_strategy="no",
    assistant_only_loss=True,
    max_length=64,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    max_steps=20,
    learning_rate=3e-4,
    gradient_checkpointing=False,
)
data = Dataset.from_list(conversations)
trainer = SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer)
trainer.train()
