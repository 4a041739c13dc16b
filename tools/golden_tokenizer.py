"""Make tests/golden/tokenizer/encodings.json: how transformers encodes the embedded default's test strings.

Takes about a minute. Tests compare with the file and never run this.
"""

# ruff: noqa: RUF001 - letters of many scripts, some of which look alike, are what this file is about

from __future__ import annotations

import json
from pathlib import Path

import transformers
from transformers import AutoTokenizer

from outrider.weights.locate import locate_target

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden" / "tokenizer" / "encodings.json"

LATIN = """The quick brown fox jumps over the lazy dog.
It's a 'quoted' "sentence" — with dashes – and… an ellipsis.
Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.
Portez ce vieux whisky au juge blond qui fume.
El pingüino Wenceslao hizo kilómetros bajo exhaustiva lluvia.
Příliš žluťoučký kůň úpěl ďábelské ódy.
Pijamalı hasta yağız şoföre çabucak güvendi.
Árvíztűrő tükörfúrógép
Tiếng Việt có rất nhiều dấu thanh điệu.
Kæmi ný öxi hér ykist þjófum nú bæði víl og ádrepa.
Łódź, Gdańsk i Świnoujście
Ĉiuj homoj estas denaske liberaj kaj egalaj.
ﬁne ﬂow ofﬁce
Ａｌｌ ｆｕｌｌ ｗｉｄｔｈ １２３
naïve café résumé
e\u0301 against \u00e9
supercalifragilisticexpialidocious
Llanfairpwllgwyngyllgogerychwyrndrobwllllantysiliogogoch
ALL CAPS SHOUTING AND camelCaseWords and snake_case_words
1 22 333 4444 55555 3.14159 1,000,000 0xDEADBEEF 1e-10
Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft"""

SCRIPTS = """Съешь же ещё этих мягких французских булок, да выпей чаю.
Чуєш їх, доцю, га? Кумедна ж ти, прощайся без ґольфів!
Ах чудна българска земьо, полюшвай цвтящи жита.
Љубазни фењерџија чађавог лица хоће да ми покаже штос.
Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.
Πᾶσα ἡ πολυτονικὴ γραφή
صِف خَلقَ خَودٍ كَمِثلِ الشَمسِ إِذ بَزَغَت
مرحبا بالعالم، كيف حالك؟
پڑھنا لکھنا سیکھیں
چگونه می‌توانم کمک کنم؟
דג סקרן שט בים מאוכזב ולפתע מצא חברה
שָׁלוֹם עוֹלָם
ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश
नमस्ते दुनिया
আমার সোনার বাংলা, আমি তোমায় ভালোবাসি।
ਸਤਿ ਸ੍ਰੀ ਅਕਾਲ
ગુજરાતી ભાષા
வணக்கம் உலகம்
తెలుగు భాష
ಕನ್ನಡ ಭಾಷೆ
മലയാളം ഭാഷ
සිංහල භාෂාව
เป็นมนุษย์สุดประเสริฐเลิศคุณค่า
สวัสดีชาวโลก
ພາສາລາວ
မြန်မာဘာသာ
ភាសាខ្មែរ
བོད་སྐད་
አማርኛ ቋንቋ
ქართული ენა
Հայերեն լեզու
ᏣᎳᎩ ᎦᏬᏂᎯᏍᏗ
ᐃᓄᒃᑎᑐᑦ
ᠮᠣᠩᠭᠣᠯ
ⵜⴰⵎⴰⵣⵉⵖⵜ
ߒߞߏ
𒀀𒁀 cuneiform
𓀀𓂀 hieroglyphs
𐎠𐎡 old persian
𐌰𐌱𐌲 gothic
我能吞下玻璃而不伤身体。
我能吞下玻璃而不傷身體。
视野无限广，窗外有蓝天
𠀀𠮷𡈽 rare ideographs
いろはにほへと ちりぬるを
私はガラスを食べられます。それは私を傷つけません。
ｶﾀｶﾅ ﾊﾝｶｸ
다람쥐 헌 쳇바퀴에 타고파
나는 유리를 먹을 수 있어요.
한글
中文English混合テキスト한국어
ꙮ ⁂ ‽ ℵ ∮ ∑ ∞ ≠ ≤ ⟨x⟩
𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝓶𝓪𝓽𝓱
∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, α ∧ ¬β
┌─┬─┐│ │ │└─┴─┘ ░▒▓█
♠♥♦♣ ♩♪♫ ☃ ☂ ★☆
€ £ ¥ ₹ ₿ ¢
x² + y³ = z⁴, H₂O, ½ ¼
ŋ ʃ ʒ θ ð ɪˈnʌf"""

EMOJI = """😀
😀😃😄😁
👍🏽 👎🏿
👨‍👩‍👧‍👦
👩🏾‍🚀 to the 🌕
🏳️‍🌈 🏴‍☠️
🇬🇧🇩🇪🇯🇵
🏴󠁧󠁢󠁥󠁮󠁧󠁿
❤️ ❤ 💔
1️⃣ 2️⃣ #️⃣
text🙂text
🧑🏻‍❤️‍💋‍🧑🏿
🫠🫡🫢
🪿🫎 new animals
☺︎ ☺️
🤷‍♀️ I don't know"""

CODE = """def f(x: int) -> int:\n    return x ** 2\n
for (int i = 0; i < n; ++i) { sum += a[i]; }
#include <stdio.h>\nint main(void) { printf("%d\\n", 42); return 0; }
SELECT * FROM users WHERE name = 'O''Brien';
<div class="a b"><p>Hello &amp; bye</p></div>
{"key": [1, 2.5, null, true], "nested": {"a": "b"}}
fn main() { let v: Vec<_> = (0..10).map(|x| x * x).collect(); }
\tif (x) {\n\t\ty();\n\t}
import numpy as np\n\n\nclass A:\n    pass\n\n\nprint(A())
https://example.com/path?query=1&b=%20#frag
user.name+tag@example.co.uk
$ grep -rn "foo.*bar" --include='*.py' . | wc -l
C:\\Users\\me\\file.txt
x=>y!==z&&w||v??u
\\frac{a}{b} \\sum_{i=0}^{n} x_i
```python\nprint("hi")\n```
| a | b |\n|---|---|\n| 1 | 2 |
#!/usr/bin/env bash\nset -euo pipefail
<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n
<bos><eos><pad><unk><mask> spelled out
<unused0> <unused99> <0x41> <0xE2><0x82>
[multimodal] <image_soft_token> <start_of_image>
<h1>title</h1> <table><tr><td>x</td></tr></table>
diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@"""


def whitespace() -> list[str]:
    """Runs of spaces, tabs, newlines and other blanks, alone and around words."""
    texts = [" " * n for n in (1, 2, 3, 4, 7, 8, 16, 30, 31, 32, 33, 63, 64, 100)]
    texts += ["\n" * n for n in (1, 2, 3, 5, 30, 31, 32, 40)]
    texts += ["\t" * n for n in (1, 2, 3, 31, 33)]
    texts += [
        " a",
        "a ",
        "  a  b  ",
        "a\u00a0b",
        "a\u3000b",
        "a\u2003b\u200ac",
        "\r\n",
        "a\r\nb\rc\n",
        " \n \n ",
        "\t \t",
    ]
    texts += ["\n\n\n  indented\n    more\n\tTab", "trailing   \n", "a" + " " * 40 + "b", "▁", "▁▁▁ a ▁b", "a▁b"]
    return texts


def control() -> list[str]:
    """Control characters, joiners, marks of direction, private use, the ends of planes."""
    texts = ["\x00", "\x01\x02\x03", "a\x00b", "\x07\x08\x0b\x0c\x1b[31mred\x1b[0m", "\x7f\x80\x9f", "\ufeffbom"]
    texts += ["zero\u200bwidth", "a\u200db", "\u202eright to left\u202c", "\ue000\uf8ff", "\ufffd\ufffe\uffff"]
    texts += ["\U0010ffff\U000f0000", "Z̸̡̛a̷l̴g̵o̶", "a" + "\u0301" * 12, "\u2028\u2029"]
    return texts


def long_words() -> list[str]:
    """Words far longer than any token, and repetitions."""
    texts = ["a" * 500, "ab" * 300, "0" * 200, "1234567890" * 30, "=" * 150, "-" * 80, "ha" * 99 + "!", "." * 70]
    texts += ["я" * 200, "漢" * 120, "😀" * 60, "ü" * 90, "\u0e01" * 70, "xyzzy" * 60, "A" * 33 + "b" * 33, "_" * 64]
    texts += ["word " * 100, "مرحبا" * 30, "नमस्ते" * 25, "안녕" * 50]
    return texts


def strings() -> list[str]:
    """All test strings, without repetition."""
    texts = ["", "a", "A", "é", "!", "0", "Hello", "hello", " Hello", "Hello, world!", "The capital of France is"]
    texts += [line.replace("\\n", "\n").replace("\\t", "\t") for line in CODE.splitlines()] + [CODE]
    for block in (LATIN, SCRIPTS, EMOJI):
        texts += block.splitlines()
        texts.append(block)
    texts += whitespace() + control() + long_words()
    words = (LATIN + " " + SCRIPTS).split()
    texts += [" ".join(words[start : start + 9]) for start in range(0, len(words) - 9, 17)]
    return list(dict.fromkeys(texts))


def main() -> None:
    """Write the fixture."""
    path = locate_target(None)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    cases = [{"text": text, "token_ids": tokenizer(text).input_ids} for text in strings()]
    decoded = [tokenizer.decode(case["token_ids"], skip_special_tokens=True) for case in cases]
    for case, text in zip(cases, decoded, strict=True):
        case["decoded"] = text
    record = {"file": path.name, "transformers": transformers.__version__, "cases": cases}
    GOLDEN.parent.mkdir(parents=True, exist_ok=True)
    GOLDEN.write_text(
        json.dumps(record, separators=(",", ":")).replace('{"text"', '\n{"text"') + "\n", encoding="utf-8"
    )
    print(f"{GOLDEN.name}: {len(cases)} strings, {sum(len(case['token_ids']) for case in cases)} tokens")


if __name__ == "__main__":
    main()
