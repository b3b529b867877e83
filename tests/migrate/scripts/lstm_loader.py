"""A recurrent classifier whose state is made for each batch, and carried from window to window inside of it."""

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCH = 8
hidden_size, num_layers = 12, 1


class LSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, hidden_size, num_layers, batch_first=True)
        self.fc = nn.Linear(hidden_size, 1)

    def forward(self, x, state):
        out, state = self.lstm(x, state)
        return self.fc(out[:, -1]), state

    def init_state(self, size):
        return (
            torch.zeros(num_layers, size, hidden_size).to(device),
            torch.zeros(num_layers, size, hidden_size).to(device),
        )


series = torch.randn(64, 10, 3)
loader = DataLoader(TensorDataset(series, series.mean((1, 2)).unsqueeze(1)), batch_size=BATCH, drop_last=True)
model = LSTM().to(device)
optimizer = optim.RMSprop(model.parameters(), lr=0.005)

for epoch in range(3):
    for seq, label in loader:
        seq, label = seq.to(device), label.to(device)
        state = model.init_state(len(seq))
        for window in seq.split(5, dim=1):
            state = tuple(s.detach() for s in state)
            prediction, state = model(window, state)
            loss = nn.functional.mse_loss(prediction, label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"epoch {epoch}: {loss.item():.6f}")
