import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 8


def main(use_amp=True):
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.randn(64, 12)
    y = x.sum(1, keepdim=True)
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH)
    model = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # bfloat16 needs no scaling, but the recipe has it
    scaler = torch.amp.GradScaler(device.type, enabled=False)

    for epoch in range(2):
        for i, (inputs, labels) in enumerate(loader):
            inputs = inputs.to(device)
            labels = labels.to(device)
            optimizer.zero_grad()
            with torch.autocast(device_type=device.type, dtype=torch.bfloat16, enabled=use_amp):
                outputs = model(inputs)
                loss = nn.functional.mse_loss(outputs.float(), labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
            scaler.step(optimizer)
            scaler.update()
            print(epoch, i, loss.item())
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=use_amp):
        print("final", nn.functional.mse_loss(model(x.to(device)).float(), y.to(device)).item())


main()
