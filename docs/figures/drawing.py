"""A sheet to draw on: boxes, arrows, words and lines as SVG, on white so that it is readable in dark pages
too."""

from html import escape

INK, FAINT = "#24292f", "#8c959f"
TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    f'orient="auto"><path d="M0 0 8 4 0 8z" fill="{INK}"/></marker></defs>'
)
SHADES = ("#ddf4ff", "#dafbe1", "#fff8c5", "#ffebe9")  # one for each rank


class Sheet:
    def __init__(self, width, height, title):
        self.size = width, height
        self.title = title
        self.parts = []

    def box(self, x, y, width, height, text="", shade="#ffffff", small=False):
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self.parts.append(f'<rect {place} rx="3" fill="{shade}" stroke="{INK}"/>')
        if text:
            self.text(x + width / 2, y + height / 2 + 4, text, small=small)

    def text(self, x, y, text, *, anchor="middle", small=False, colour=INK):
        size = 11 if small else 13
        look = f'text-anchor="{anchor}" font-size="{size}" fill="{colour}"'
        self.parts.append(f'<text x="{x:g}" y="{y:g}" {look}>{escape(text)}</text>')

    def arrow(self, x1, y1, x2, y2, colour=INK):
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}" stroke-width="1.5" '
            'marker-end="url(#tip)"/>'
        )

    def line(self, points, colour=FAINT, width=1.0, dashes=""):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"{dashed}/>'
        )

    def dot(self, x, y, colour):
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')

    def __str__(self):
        width, height = self.size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            'font-family="system-ui, sans-serif" role="img">'
        )
        shown = f"<title>{escape(self.title)}</title>{TIP}"
        ground = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
        return "\n".join([head, shown, ground, *self.parts, "</svg>"]) + "\n"
