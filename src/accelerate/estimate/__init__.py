"""How much memory a model needs, before it has any.

- `subject`: the model that is asked about, by its name on the hub, its folder, or the function that builds it.
- `trace`: one training step on tensors without values, every allocation counted.
- `layout`: what of that lies on one rank, under each way of training on several.
"""
