"""The public option classes: what users pass to the Accelerator, over the options of ``settings``."""
