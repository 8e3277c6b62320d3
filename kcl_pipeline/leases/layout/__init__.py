"""Where the rows of an application are: in three tables, or in the single table of KCL 3.5."""
