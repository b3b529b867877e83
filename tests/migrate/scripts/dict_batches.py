import torch
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

EPOCHS, BATCH = 2, 8
DEVICE = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")


class Texts(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(1)
        self.ids = torch.randint(0, 50, (64, 6), generator=g)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        ids = self.ids[index]
        return {"input_ids": ids, "attention_mask": (ids > 4).float(), "labels": (ids.sum() % 3)}


class Bag(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 16)
        self.head = torch.nn.Linear(16, 3)

    def forward(self, input_ids, attention_mask, labels=None):
        mask = attention_mask.unsqueeze(-1)
        logits = self.head((self.embedding(input_ids) * mask).sum(1) / mask.sum(1).clamp(min=1))
        loss = torch.nn.functional.cross_entropy(logits, labels) if labels is not None else None
        return {"loss": loss, "logits": logits}


torch.manual_seed(0)
dataset = Texts()
train_dataloader = DataLoader(dataset, batch_size=BATCH)
eval_dataloader = DataLoader(dataset, batch_size=16)
model = Bag()
model.to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
num_training_steps = EPOCHS * len(train_dataloader)
lr_scheduler = OneCycleLR(optimizer, max_lr=1e-2, total_steps=num_training_steps)

progress_bar = tqdm(range(num_training_steps), disable=True)
for epoch in range(EPOCHS):
    model.train()
    for batch in train_dataloader:
        batch = {k: v.to(DEVICE) for k, v in batch.items()}
        outputs = model(**batch)
        loss = outputs["loss"]
        loss.backward()
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        progress_bar.update(1)
        print("lr", lr_scheduler.get_last_lr()[0], loss.item())

    model.eval()
    losses = []
    for batch in eval_dataloader:
        with torch.no_grad():
            outputs = model(**{k: v.to(DEVICE) for k, v in batch.items()})
        losses.append(outputs["loss"].item())
    print("evaluated", sum(losses) / len(losses))
