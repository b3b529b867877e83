import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 8


class Trainer:
	"""Indented with tabs."""

	def __init__(self, lr=0.05, epochs=3):
		self.epochs = epochs
		self.device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
		torch.manual_seed(3)
		self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
		self.model.to(self.device)
		self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
		self.criterion = nn.MSELoss().to(self.device)
		data = torch.randn(48, 6)
		self.data = TensorDataset(data, data.pow(2).sum(1, keepdim=True))
		self.train_loader = DataLoader(self.data, batch_size=BATCH)
		self.val_loader = DataLoader(self.data, batch_size=20)

	def train_epoch(self):
		self.model.train()
		total = 0.0
		for inputs, targets in self.train_loader:
			inputs = inputs.to(self.device, non_blocking=True)
			targets = targets.to(self.device, non_blocking=True)
			self.optimizer.zero_grad(set_to_none=True)
			loss = self.criterion(self.model(inputs), targets)
			loss.backward()
			torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
			self.optimizer.step()
			total += loss.item()
		return total / len(self.train_loader)

	@torch.no_grad()
	def validate(self):
		self.model.eval()
		total = 0.0
		for inputs, targets in self.val_loader:
			inputs, targets = inputs.to(self.device), targets.to(self.device)
			total += self.criterion(self.model(inputs), targets).item()
		return total / len(self.val_loader)

	def fit(self):
		for epoch in range(self.epochs):
			train_loss = self.train_epoch()
			print("train", epoch, train_loss)
		print("final", self.validate())


Trainer().fit()
