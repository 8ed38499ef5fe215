"""The library behind the course: one folder a part of the lecture.

model/         the Transformer that everything measures: attention, cache, weights, training
kernels/       Triton kernels, each beside its torch reference
roofline/      accelerators, timing, and the accounting of FLOPs and bytes     notebooks 01-03
kv_reduction/  fewer KV heads, latents, shared layers, windows                 notebook 04
alternatives/  recurrent layers, hybrids, masked diffusion                     notebook 05
quantization/  formats, scales, LLM.int8(), AWQ, NF4 and int4 as layers        notebook 06
pruning/       importance, smaller checkpoints, distillation                   notebook 07
speculative/   draft, verify, Medusa, EAGLE: several tokens a forward          notebook 08
serving/       schedulers, paged memory, the engine: many requests at once     notebooks 09-10
merging/       one model out of several fine-tunes, without training           notebook 11
parallel/      tensor parallelism: one model over several processes            notebooks 03, 12
together/      any combination of the parts, predicted and measured            notebook 12
classroom/     exercises, figures, widgets, notebook builds, grading, doctor   all notebooks

A part imports the ground (model, kernels) and roofline, never another part; together
imports all parts, and nothing imports the classroom.
Command line: python -m lecture_util doctor | build | grade | figures | merge | model
"""
