"""How much memory a model needs, before it has any.

- `subject`: the model that is asked about, by its name on the hub, its folder, or the function that builds it.
  `inputs`: what models of known libraries are called with; `script`: the model that a training script prepares.
- `trace`: one training step on tensors without values, every allocation counted; `meter` counts.
- `layout`: what of that lies on one rank, under each way of training on several; `plan` chooses among them.
- `report`: an estimate as tables, JSON and a drawing.
"""
