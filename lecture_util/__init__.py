"""The library behind the course: one folder a part of the lecture.

model/       the Transformer that everything measures: config, attention, cache, weights, generation
roofline/    accelerators, timing, and the accounting of FLOPs and bytes     notebooks 01-03
classroom/   exercises, figures, widgets, notebook builds, grading, doctor   all notebooks

A part imports the ground (model) and roofline, never another part; nothing imports the classroom.
Command line: python -m lecture_util doctor | build | grade | figures | model
"""
