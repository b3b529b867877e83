# The blog post's evaluation listing. Corrected: the labels are cut from the labels.
eval_dataloader = accelerator.prepare(eval_dataloader)
predictions, labels = [], []
for source, targets in eval_dataloader:
    with torch.no_grad():
        output = model(source)

    predictions.append(accelerator.gather(output).cpu().numpy())
    labels.append(accelerator.gather(targets).cpu().numpy())

predictions = np.concatenate(predictions)
labels = np.concatenate(labels)

predictions = predictions[:len(eval_dataloader.dataset)]
labels = labels[:len(eval_dataloader.dataset)]

metric_compute(predictions, labels)
