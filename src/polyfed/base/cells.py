"""Text in CSV files that a spreadsheet would take for a formula: marked by an apostrophe, as spreadsheets do it."""

FORMULA = ("=", "+", "-", "@", "\t", "\r")


def marked(text: str) -> str:
    """A text as a CSV cell; what begins like a formula, or like a text so marked, gets an apostrophe in front."""
    return f"'{text}" if text.startswith(FORMULA) or unmarked(text) != text else text


def unmarked(cell: str) -> str:
    """The text that `marked` was given."""
    return cell[1:] if cell.startswith("'") and cell[1:].startswith((*FORMULA, "'")) else cell
