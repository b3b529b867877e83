"""Stands in for torchvision: a small dataset of CIFAR's shape whose classes can be told apart."""
