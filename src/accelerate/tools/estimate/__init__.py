"""Estimates of the memory that a model needs for training, before any is allocated.

- `subject`: the model to estimate: by its name on the hub, its folder, the function that builds it, or a training
  script; and the inputs of models of known libraries.
- `trace`: one training step on tensors without values; `allocations` counts every allocation in it.
- `plan`: the memory of each parallel layout per rank, and the choice among the layouts.
- `report`: an estimate as tables, JSON and a chart.
"""
