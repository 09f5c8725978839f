"""Tables of polars, pyarrow, parquet, Excel and databases, as the core reads a pandas DataFrame."""
