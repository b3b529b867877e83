import os

import numpy
import torch


class CIFAR10(torch.utils.data.Dataset):
    def __init__(self, root, train=True, transform=None, download=False):
        count = int(os.environ.get("STUB_CIFAR_SAMPLES", "500"))
        draw = numpy.random.default_rng(0 if train else 1)
        self.targets = draw.integers(0, 10, count)
        prototypes = numpy.random.default_rng(2).integers(0, 256, (10, 32, 32, 3))
        noise = draw.integers(-60, 60, (count, 32, 32, 3))
        self.data = numpy.clip(prototypes[self.targets] + noise, 0, 255).astype(numpy.uint8)
        self.transform = transform

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        image = self.data[index]
        return (self.transform(image) if self.transform else image), int(self.targets[index])
