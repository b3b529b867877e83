"""Which part of a model lies where, when the model is larger than one device.

- `tensors`: the tensors of a module by name; `sizes`: how many bytes they take; `tied`: which of them are one and the
  same; `budget`: how many bytes each device has.
- `plan`: the documented greedy map; `exact`: a small exact search; both explain themselves when printed.
- `place`: one tensor on its device; `load`: a whole checkpoint on its devices.
"""
