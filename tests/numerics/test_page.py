"""The page: what is in it, that it loads nothing, and that names stay text."""

from __future__ import annotations

import json
import re

from sensitivity_lines import FORMATS, layer, layers

from mpguard.numerics.page import html
from mpguard.numerics.report import gathered


def page(*lines: object) -> str:
    found = gathered(list(lines), "tensorwise", FORMATS)  # type: ignore[arg-type]
    return html(found, found.propose())


def test_the_page_has_the_layers_the_proposal_and_data() -> None:
    text = page(layers("a", "b", "q", unmeasured={"q": "is quantized"}), layer("a", 2, tensorwise=7.0), layer("b", 3))
    parts = "Sensitivity: 2 layers, 2 steps", "FP8 tensorwise", "7.0", "66.7%", "mpguard_fp8_modules:", "<noscript>"
    for part in (*parts, "is quantized"):
        assert part in text, part
    assert "{{" not in text.replace("${", "")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found is not None
    data = json.loads(found[1])
    assert data["steps"] == [2, 3]
    assert data["layers"][0]["name"] == "a"
    assert data["layers"][0]["steps"][0]["output"]["tensorwise"] == 7.0
    assert data["format"] == "tensorwise"


def test_it_loads_nothing_and_names_stay_text() -> None:
    name = "</script><img src=x onerror=alert(1)>"
    text = page(layers(name), layer(name, tensorwise=1.0))
    assert "<img" not in text
    assert text.count("</script>") == 2
    assert not re.search(r'(src|href)="(?!#)', text)
    assert "default-src 'none'" in text
