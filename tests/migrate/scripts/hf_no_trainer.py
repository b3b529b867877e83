"""The full training loop of a course on transformers: a schedule by steps, a bar over all steps, a metric object."""
import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

BATCH = 8


class Output(dict):
    __getattr__ = dict.__getitem__


class TinyForSequenceClassification(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(20, 8)
        self.classifier = torch.nn.Linear(8, 2)

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        hidden = self.embed(input_ids) * attention_mask.unsqueeze(-1)
        logits = self.classifier(hidden.sum(1) / attention_mask.sum(1, keepdim=True))
        return Output(loss=torch.nn.functional.cross_entropy(logits, labels), logits=logits)


class Accuracy:
    def __init__(self):
        self.right, self.seen = 0, 0

    def add_batch(self, predictions, references):
        self.right += (predictions == references).sum().item()
        self.seen += len(references)

    def compute(self):
        return {"accuracy": self.right / self.seen, "samples": self.seen}


def get_scheduler(name, optimizer, num_warmup_steps, num_training_steps):
    return LambdaLR(optimizer, lambda step: max(0.0, 1.0 - step / max(1, num_training_steps)))


def data_collator(features):
    return {
        "input_ids": torch.stack([each["input_ids"] for each in features]),
        "attention_mask": torch.ones(len(features), 5),
        "labels": torch.tensor([each["labels"] for each in features]),
    }


torch.manual_seed(11)
ids = torch.randint(0, 20, (80, 5))
rows = [{"input_ids": row, "labels": int(row.sum() % 2)} for row in ids]
tokenized_datasets = {"train": rows[:64], "validation": rows[64:]}
train_dataloader = DataLoader(tokenized_datasets["train"], batch_size=BATCH, collate_fn=data_collator)
eval_dataloader = DataLoader(tokenized_datasets["validation"], batch_size=8, collate_fn=data_collator)
model = TinyForSequenceClassification()
optimizer = AdamW(model.parameters(), lr=5e-2)
num_epochs = 3
num_training_steps = num_epochs * len(train_dataloader)
lr_scheduler = get_scheduler(
    "linear",
    optimizer=optimizer,
    num_warmup_steps=0,
    num_training_steps=num_training_steps,
)
print(num_training_steps > 0)
device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
model.to(device)

progress_bar = tqdm(range(num_training_steps))
model.train()
for epoch in range(num_epochs):
    for batch in train_dataloader:
        batch = {k: v.to(device) for k, v in batch.items()}
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        progress_bar.update(1)
print("final bar", progress_bar.n == progress_bar.total)

metric = Accuracy()
model.eval()
for batch in eval_dataloader:
    batch = {k: v.to(device) for k, v in batch.items()}
    with torch.no_grad():
        outputs = model(**batch)
    logits = outputs.logits
    predictions = torch.argmax(logits, dim=-1)
    metric.add_batch(predictions=predictions, references=batch["labels"])
print("final", metric.compute())
