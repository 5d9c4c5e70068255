"""What `__init__.py` loads on first use."""

from .export import CSV_FILE as CSV_FILE
from .export import PARQUET_FILE as PARQUET_FILE
from .figures import MAIN_FILE as MAIN_FILE
from .files import write_all as write_all
from .page import REPORT_FILE as REPORT_FILE
from .results import Results as Results
from .table import terminal_table as terminal_table
from .table import terminal_tables as terminal_tables
from .verdict import VERDICT_FILE as VERDICT_FILE
