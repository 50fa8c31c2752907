"""Makes the reference of the public names: `python -m sphinx -nW --keep-going docs/reference build/reference`."""

project = "keras_replicas"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
toc_object_entries_show_parents = "hide"
html_theme = "pyramid"
html_sidebars = {"**": ["localtoc.html", "searchbox.html"]}
# What stands between backticks is a link, or else one of these:
default_role = "py:obj"
names = """
    BatchNormalization CSVLogger EarlyStopping Embedding MirroredStrategy ModelCheckpoint MultiWorkerMirroredStrategy
    PyDataset ReduceLROnPlateau SwapEMAWeights TPUStrategy TensorBoard activity_regularizer add_loss batch_size compile
    compute_loss compute_metrics evaluate fit from_preset jit_compile learning_rate loss predict steps_per_epoch
    steps_per_execution
    test_step train_step
    accumulate build context count custom_step difference error first_step init_fn mean_over probe_call replicas size
    source step step_values steps steps.jsonl steps_done stop target x
"""
nitpick_ignore_regex = [
    ("py:class", r"(collections|keras|numpy|os|tensorflow)\..*"),
    ("py:obj", r".*[^\w.].*|[A-Z_]+|(keras|model|optimizer|strategy|tf)\..*|" + "|".join(names.split())),
]
