"""Merging: one model out of several fine-tunes, without training.

soups             means of models, and the greedy way to choose who is in
slerp             along the arc instead of the chord
task_vectors      what fine-tuning added: add it, take it away, scale it
sparsify          thin a task vector out: largest, random, middle, large ones likelier
ties              trim, elect signs, average what agrees
model_stock       how far to trust a mean, from the angle between fine-tunes
select            the k least of many numbers; a model's k-th largest, one tensor at a time
conventions       where papers and mergekit differ: one flag each
methods           every method by its recipe name
parameters        what a method can be told, and how that is checked
tensors           compute wide, cast once, cut in chunks; states name by name
plan              from models to the merged one, tensor by tensor
checkpoint        folders read and written one tensor at a time
vocabulary        rows aligned by token
recipe            mergekit's YAML, read strictly
schema            a recipe's keys, and how an entry that does not fit is refused
values            numbers, gradients over the layers, filters
layers            which tensors belong to which layer
fits              whether a recipe's models fit together
job               a recipe with its models open: what each tensor is made of
merge             folders in, folder out: `python -m lecture_util merge recipe.yml out/`
tiny_tasks        one tiny base, several tasks, fine-tunes in a second each: merging tried out live
adapters          low-rank fine-tunes of the reference model, combined exactly
adapter_training  how they were trained
real_tasks        facts, a format and a skill, scored by exact answers
landscape         the loss along the line and on the plane between models
"""
