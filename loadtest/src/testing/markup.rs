//! Reads the pages and pictures that tests look into.

use std::collections::BTreeMap;

/// One element with its attributes and the text right inside it, entities as they are.
#[derive(Debug)]
pub struct Element {
    pub name: String,
    pub attributes: BTreeMap<String, String>,
    pub text: String,
}

impl Element {
    pub fn class(&self) -> &str {
        self.attributes.get("class").map_or("", String::as_str)
    }

    pub fn number(&self, attribute: &str) -> f64 {
        let value = self.attributes.get(attribute).unwrap_or_else(|| panic!("{self:?} has no {attribute}"));
        value.parse().unwrap_or_else(|_| panic!("{attribute} of {self:?} is no number"))
    }
}

/// The elements of `markup` in the order in which they open.
///
/// Panics where tags do not nest or an attribute is not quoted, which is stricter than HTML but for `meta`, which has
/// no end.
pub fn elements(markup: &str) -> Vec<Element> {
    let (mut found, mut open): (Vec<Element>, Vec<usize>) = (Vec::new(), Vec::new());
    let mut pieces = markup.split('<');
    assert_eq!(pieces.next().map(str::trim), Some(""), "text before the first tag");
    for piece in pieces {
        let (tag, text) = piece.split_once('>').unwrap_or_else(|| panic!("a tag without end: {piece}"));
        if let Some(name) = tag.strip_prefix('/') {
            let closed = open.pop().unwrap_or_else(|| panic!("</{name}> closes nothing"));
            assert_eq!(found[closed].name, name, "tags do not nest");
        } else if !tag.starts_with('!') {
            let (name, attributes) = tag.trim_end_matches('/').split_once(' ').unwrap_or((tag, ""));
            let name = name.trim_end_matches('/').to_owned();
            found.push(Element { name, attributes: attributes_of(attributes), text: String::new() });
            if !tag.ends_with('/') && found[found.len() - 1].name != "meta" {
                open.push(found.len() - 1);
            }
        }
        if let Some(&inside) = open.last() {
            found[inside].text.push_str(text.trim());
        }
    }
    assert!(open.is_empty(), "elements left open");
    found
}

/// Panics where `page` asks for anything but itself.
pub fn stands_alone(page: &str) {
    for outside in ["http://", "https://", "url(", "@import", "<script", "<link", " src=", " href="] {
        assert!(!page.contains(outside), "{outside}");
    }
}

/// Panics unless every point of a line and every mark lies in the frame that was drawn last before it.
pub fn within(elements: &[Element]) {
    let mut frame = None;
    for element in elements {
        let points: Vec<(f64, f64)> = match element.name.as_str() {
            "rect" if element.class() == "frame" => {
                let [x, y, width, height] = ["x", "y", "width", "height"].map(|name| element.number(name));
                frame = Some((x..=x + width, y..=y + height));
                continue;
            }
            "circle" => vec![(element.number("cx"), element.number("cy"))],
            "polyline" => element.attributes["points"].split_whitespace().map(point).collect(),
            _ => continue,
        };
        let (across, up) = frame.as_ref().expect("a frame before the lines");
        for (x, y) in points {
            assert!(across.contains(&x) && up.contains(&y), "({x}, {y}) lies beside the frame");
        }
    }
}

fn attributes_of(mut text: &str) -> BTreeMap<String, String> {
    let mut attributes = BTreeMap::new();
    while let Some((name, rest)) = text.split_once("=\"") {
        let (value, after) = rest.split_once('"').unwrap_or_else(|| panic!("{name} has no closing quote"));
        attributes.insert(name.trim().to_owned(), value.to_owned());
        text = after;
    }
    assert_eq!(text.trim(), "", "an attribute without quotes");
    attributes
}

fn point(text: &str) -> (f64, f64) {
    let (x, y) = text.split_once(',').expect("x,y");
    (x.parse().expect("a number"), y.parse().expect("a number"))
}
