import torch


class ToTensor:
    def __call__(self, image):
        return torch.from_numpy(image).permute(2, 0, 1).float() / 255
