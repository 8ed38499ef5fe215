"""Merging: one model out of several fine-tunes, without training.

soups         means of models, and the greedy way to choose who is in
slerp         along the arc instead of the chord
task_vectors  what fine-tuning added: add it, take it away, scale it
sparsify      thin a task vector out: the largest, a random part, the middle, large ones likelier
ties          trim, elect signs, average what agrees
model_stock   how far to trust a mean, from the angle between fine-tunes
select        the k least of many numbers; a model's k-th largest, one tensor at a time
conventions   where papers and mergekit differ: one flag each
methods       every method by its recipe name, with its settings
tensors       compute wide, cast once, cut in chunks; states name by name
plan          from models to the merged one, tensor by tensor
checkpoint    folders read and written one tensor at a time
vocabulary    rows aligned by token
recipe        mergekit's YAML, read strictly
merge         folders in, folder out: `python -m lecture_util merge recipe.yml out/`
tiny_tasks    one tiny base, several tasks, fine-tunes in a second each: merging tried out live
adapters      low-rank fine-tunes: merge the products, never the factors
real_tasks    three small tasks for the reference model, and its score on each
landscape     the loss along the line and on the plane between models
"""
