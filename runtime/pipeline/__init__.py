"""The same on a pipeline: this rank's stages, and the schedule that runs them.

Decides how stages look like one `nn.Module`. When which stage runs, the plan says.
"""
