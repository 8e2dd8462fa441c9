from bench.generation import PROMPTS, SEQUENCES
from bench.generation_report import Run, page


def test_the_page_compares_runs_of_the_same_round() -> None:
    runs = [
        Run(1, bare=20.0, bare_first_s=0.1, served=18.0, served_first_s=0.2),
        Run(8, bare=100.0, bare_first_s=0.5, served=90.0, served_first_s=0.6),
        Run(1, bare=10.0, bare_first_s=0.3, served=10.0, served_first_s=0.4),
        Run(1, bare=40.0, bare_first_s=0.2, served=32.0, served_first_s=0.3),
    ]

    text = page(runs, 64, "make bench-generation", 60)

    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert ["1", "20", "18", "0.90", "0.80 to 1.00", "200", "300"] in rows
    assert ["8", "100", "90", "0.90", "0.90 to 0.90", "500", "600"] in rows
    assert ["4", "1", "40", "32", "0.80"] in rows
    assert "`make bench-generation` in 60 s" in text


def test_there_is_a_prompt_for_each_text_at_a_time() -> None:
    assert len(set(PROMPTS)) == max(SEQUENCES)
