"""TRL's GKDTrainer: a student learns a teacher's probabilities of given answers."""

import random

import torch
from datasets import Dataset
from small import llama, sentence, words
from trl.experimental.gkd import GKDConfig, GKDTrainer

TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ message['content'] + ' </s> ' }}"
    "{% else %}{{ '<s> ' + message['content'] + ' ' }}{% endif %}{% endfor %}"
)

draw = random.Random(0)
conversations = []
for _ in range(200):
    question = {"role": "user", "content": sentence(draw, 3, 6)}
    answer = {"role": "assistant", "content": sentence(draw, 3, 8)}
    conversations.append({"messages": [question, answer]})

torch.manual_seed(0)
student = llama()
teacher = llama()
tokenizer = words()
tokenizer.chat_template = TEMPLATE
arguments = GKDConfig(
    output_dir="out",
    use_cpu=True,
    bf16=False,
    report_to="none",
    save_strategy="no",
    lmbda=0.0,
    max_length=64,
    per_device_train_batch_size=4,
    max_steps=20,
    learning_rate=1e-4,
    gradient_checkpointing=False,
)
data = Dataset.from_list(conversations)
trainer = GKDTrainer(
    model=student, teacher_model=teacher, args=arguments, train_dataset=data, processing_class=tokenizer
)
trainer.train()
