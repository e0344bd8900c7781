"""Questions about a project that are answered by a search of all its files.

asked.py     the files, their contents, which of them use which; how an answer is recorded
uses.py      the functions, classes and attributes of a file that other files use
settings.py  what scripts, configs and code ask for: options, DeepSpeed, scalers, compilation
copies.py    copies of other packages, and their examples
"""

from mpguard.lint.project.questions import copies, settings, uses
from mpguard.lint.project.questions.asked import answer, answered, ask

__all__ = ["answer", "answered", "ask", "copies", "settings", "uses"]
