# The blog post's single-process evaluation listing. Corrected: nothing.
predictions, labels = [], []
for source, targets in eval_dataloader:
    with torch.no_grad():
        output = model(source)

    predictions.append(output.cpu().numpy())
    labels.append(targets.cpu().numpy())

predictions = np.concatenate(predictions)
labels = np.concatenate(labels)


metric_compute(predictions, labels)
