//! References that lead back to themselves without a value between: no value keeps to such a schema, and llguidance
//! notices only where the value is to begin, which may be in the middle of an answer.

use std::collections::HashMap;

use serde_json::Value;

use super::{
    NOTHING,
    schema::{BY_NAME, VALUES},
};

/// Schemas, and choices of some, that what is referred to begins with, at most: each is looked at once, and so is each
/// mention of it.
const MOST: usize = 1 << 16;

/// # Errors
/// A schema inside of `root` begins with itself in every case: says where it stands. Or too many may be begun with.
pub(super) fn check(root: &Value) -> Result<(), String> {
    let mut graph =
        Graph { root, nodes: Vec::new(), schemas: HashMap::new(), references: HashMap::new(), left: Vec::new() };
    graph.refer(root)?;
    // A chain of references may be longer than a stack is deep.
    while let Some((schema, node)) = graph.left.pop() {
        graph.needs_of(schema, node)?;
    }
    graph.begin();
    let endless =
        |to: &str| graph.references.get(to).is_some_and(|node| node.is_some_and(|at| graph.nodes[at].needs > 0));
    let none = graph.nodes.iter().all(|node| node.needs == 0);
    if none { Ok(()) } else { check_inside(root, &endless, &mut Vec::new()) }
}

/// What a value that keeps to a schema has to begin with, or one of several.
#[derive(Default)]
struct Node {
    /// Nodes that have to begin before it does.
    needs: usize,
    /// Those that need it.
    wanted_by: Vec<usize>,
}

struct Graph<'a> {
    root: &'a Value,
    nodes: Vec<Node>,
    /// By where they are in memory, so that one schema is one node however it is referred to.
    schemas: HashMap<*const Value, usize>,
    /// By what is written; `None` of what is nowhere.
    references: HashMap<&'a str, Option<usize>>,
    /// Whose needs are not known yet.
    left: Vec<(&'a Value, usize)>,
}

impl<'a> Graph<'a> {
    /// Adds whatever is referred to in `value`.
    fn refer(&mut self, value: &'a Value) -> Result<(), String> {
        match value {
            Value::Array(list) => list.iter().try_for_each(|value| self.refer(value)),
            Value::Object(fields) => {
                if let Some(to) = fields.get("$ref").and_then(Value::as_str) {
                    self.reference(to)?;
                }
                fields.values().try_for_each(|value| self.refer(value))
            }
            _ => Ok(()),
        }
    }

    fn reference(&mut self, to: &'a str) -> Result<Option<usize>, String> {
        if let Some(known) = self.references.get(to) {
            return Ok(*known);
        }
        let schema = to.strip_prefix('#').and_then(|to| self.root.pointer(to));
        let node = schema.map(|schema| self.schema(schema)).transpose()?;
        self.references.insert(to, node);
        Ok(node)
    }

    fn schema(&mut self, schema: &'a Value) -> Result<usize, String> {
        if let Some(known) = self.schemas.get(&std::ptr::from_ref(schema)) {
            return Ok(*known);
        }
        let node = self.node()?;
        self.schemas.insert(schema, node);
        self.left.push((schema, node));
        Ok(node)
    }

    fn needs_of(&mut self, schema: &'a Value, node: usize) -> Result<(), String> {
        if let Some(to) = schema["$ref"].as_str()
            && let Some(target) = self.reference(to)?
        {
            self.need(node, target);
        }
        for schema in schema["allOf"].as_array().into_iter().flatten() {
            let each = self.schema(schema)?;
            self.need(node, each);
        }
        for choices in ["anyOf", "oneOf"].iter().filter_map(|name| schema[name].as_array().filter(|of| !of.is_empty()))
        {
            let choice = self.node()?;
            self.need(node, choice);
            // The first that begins is enough.
            self.nodes[choice].needs = 1;
            for schema in choices {
                let one = self.schema(schema)?;
                self.nodes[one].wanted_by.push(choice);
            }
        }
        Ok(())
    }

    fn node(&mut self) -> Result<usize, String> {
        if self.nodes.len() == MOST {
            return Err(format!("$ref: more than {MOST} schemas may begin what is referred to"));
        }
        self.nodes.push(Node::default());
        Ok(self.nodes.len() - 1)
    }

    fn need(&mut self, node: usize, needed: usize) {
        self.nodes[node].needs += 1;
        self.nodes[needed].wanted_by.push(node);
    }

    /// Lets whatever needs nothing begin, and then what needed that.
    fn begin(&mut self) {
        let mut begun: Vec<usize> = (0..self.nodes.len()).filter(|at| self.nodes[*at].needs == 0).collect();
        while let Some(at) = begun.pop() {
            for wanted_by in std::mem::take(&mut self.nodes[at].wanted_by) {
                let node = &mut self.nodes[wanted_by];
                if node.needs > 0 {
                    node.needs -= 1;
                    begun.extend((node.needs == 0).then_some(wanted_by));
                }
            }
        }
    }
}

/// Whether a value that keeps to the schema has no beginning, by what is known of references.
fn is_endless(schema: &Value, endless: &impl Fn(&str) -> bool) -> bool {
    let list = |name: &str| schema[name].as_array().map_or(&[][..], Vec::as_slice);
    let each = |name: &str| !list(name).is_empty() && list(name).iter().all(|schema| is_endless(schema, endless));
    let refers = schema["$ref"].as_str().is_some_and(endless);
    refers || each("anyOf") || each("oneOf") || list("allOf").iter().any(|schema| is_endless(schema, endless))
}

/// `path`: the names that lead to the schema.
fn check_inside<'a>(schema: &'a Value, endless: &impl Fn(&str) -> bool, path: &mut Vec<&'a str>) -> Result<(), String> {
    let fields = match schema {
        Value::Array(list) => return list.iter().try_for_each(|schema| check_inside(schema, endless, path)),
        Value::Object(fields) => fields,
        _ => return Ok(()),
    };
    if is_endless(schema, endless) {
        return Err(if path.is_empty() { NOTHING.into() } else { format!("{}: {NOTHING}", path.join(".")) });
    }
    for (name, value) in fields.iter().filter(|(name, _)| !VALUES.contains(&name.as_str())) {
        path.push(name);
        match value {
            Value::Object(schemas) if BY_NAME.contains(&name.as_str()) => {
                for (name, schema) in schemas {
                    path.push(name);
                    check_inside(schema, endless, path)?;
                    path.pop();
                }
            }
            value => check_inside(value, endless, path)?,
        }
        path.pop();
    }
    Ok(())
}
