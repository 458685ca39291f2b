"""PEFT's LoRA in a loop of one's own: adapters on queries and values, two micro-batches a step."""

import torch
from peft import LoraConfig, get_peft_model
from small import llama, rows_of_tokens
from torch.utils.data import DataLoader

ACCUMULATE = 2

torch.manual_seed(0)
model = llama()
settings = LoraConfig(
    r=4, lora_alpha=8, lora_dropout=0.05, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
)
model = get_peft_model(model, settings)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

rows = torch.tensor(rows_of_tokens(200, 12, 12))
loader = DataLoader(rows, batch_size=4, shuffle=True)
model.train()
for index, ids in enumerate(loader):
    loss = model(input_ids=ids, labels=ids).loss
    (loss / ACCUMULATE).backward()
    if (index + 1) % ACCUMULATE == 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
