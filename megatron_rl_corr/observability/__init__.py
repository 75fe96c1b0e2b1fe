"""What a run tells its user: a metrics file, a live table, TensorBoard scalars, plots and an HTML page."""
