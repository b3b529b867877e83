# The notes' listing that gathers predictions. Corrected: the model is put in evaluation first.
model.eval()
for inputs, targets in validation_dataloader:
    predictions = model(inputs)
    # Gather all predictions and targets
    all_predictions = accelerator.gather(predictions)
