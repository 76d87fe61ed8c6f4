//! Grammars in GBNF against a plain matcher, and what is wrong with others.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::{parse::Rule, *};
use crate::text::grammar::{Body, Constraint, Form, tests::Followed};

fn followed(gbnf: &str) -> Result<Followed, String> {
    Followed::new(&Form { body: Body::Constraint(Constraint::Grammar(gbnf.into())), thinking: None })
}

/// Where a node's texts may end that begin at each place: the plain way, by what rules are known to match so far.
fn ends(node: &Node, text: &[u32], from: usize, rules: &[Vec<BTreeSet<usize>>]) -> BTreeSet<usize> {
    let step = |places: &BTreeSet<usize>, node: &Node| -> BTreeSet<usize> {
        places.iter().flat_map(|at| ends(node, text, *at, rules)).collect()
    };
    match node {
        Node::Class(class) | Node::Run(class) => {
            let matches =
                text.get(from).is_some_and(|char| class.iter().any(|(low, high)| (low..=high).contains(&char)));
            matches.then_some(from + 1).into_iter().collect()
        }
        Node::Text(chars) => text[from..].starts_with(chars).then_some(from + chars.len()).into_iter().collect(),
        Node::Rule(rule) => rules[*rule][from].clone(),
        Node::All(nodes) => nodes.iter().fold(BTreeSet::from([from]), |places, node| step(&places, node)),
        Node::Any(nodes) => nodes.iter().flat_map(|node| ends(node, text, from, rules)).collect(),
        Node::Repeated(node, least, most) => {
            let mut places = BTreeSet::from([from]);
            (0..*least).for_each(|_| places = step(&places, node));
            let mut all = places.clone();
            for _ in *least..most.unwrap_or(least + text.len() as u32) {
                places = step(&places, node);
                all.extend(&places);
            }
            all
        }
    }
}

fn matches(rules: &[Rule], root: usize, text: &str) -> bool {
    let text: Vec<u32> = text.chars().map(u32::from).collect();
    let mut known = vec![vec![BTreeSet::new(); text.len() + 1]; rules.len()];
    loop {
        let of = |rule: &Rule| (0..=text.len()).map(|from| ends(&rule.body, &text, from, &known)).collect();
        let found: Vec<Vec<BTreeSet<usize>>> = rules.iter().map(of).collect();
        if found == known {
            return known[root][0].contains(&text.len());
        }
        known = found;
    }
}

/// A part of a rule, of three rules in all.
fn part() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        Just("\"a\"".to_owned()),
        Just("\"ab\"".to_owned()),
        Just("\"ba\"".to_owned()),
        Just("\"abc\"".to_owned()),
        Just("\"\"".to_owned()),
        Just("[ab]".to_owned()),
        Just("[^a]".to_owned()),
        Just("[b-c]".to_owned()),
        Just(".".to_owned()),
        Just("x".to_owned()),
        Just("y".to_owned()),
        Just("root".to_owned()),
    ];
    leaf.prop_recursive(3, 12, 3, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 1..4).prop_map(|parts| parts.join(" ")),
            prop::collection::vec(inner.clone(), 2..4).prop_map(|parts| format!("({})", parts.join(" | "))),
            (inner, prop::sample::select(vec!["*", "+", "?", "{2}", "{1,2}", "{1,}"]))
                .prop_map(|(part, count)| format!("({part}){count}")),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn a_grammar_has_the_texts_that_the_plain_way_has(root in part(), x in part(), y in part()) {
        let gbnf = format!("root ::= {root}\nx ::= {x} | \"c\"\ny ::= \"b\" ({y})?");
        let parse::Grammar { rules, root } = parse::grammar(&gbnf).unwrap();
        let lark = to_lark(&gbnf).unwrap();
        let all = (0..=4u32).flat_map(|length| (0..3u32.pow(length)).map(move |number| (length, number)));
        let texts: Vec<String> = all
            .map(|(length, number)| {
                let digit = |at| number / 3u32.pow(at) % 3;
                (0..length).map(|at| ["a", "b", "c"][digit(at) as usize]).collect()
            })
            .collect();
        let expected: Vec<&String> = texts.iter().filter(|text| matches(&rules, root, text)).collect();
        match followed(&gbnf) {
            Ok(followed) => {
                let allowed: Vec<&String> = texts.iter().filter(|text| followed.allows(text)).collect();
                prop_assert_eq!(allowed, expected, "{}\n{}", gbnf, lark);
            }
            // A grammar that has no text at all is refused.
            Err(problem) => prop_assert!(expected.is_empty(), "{}\n{}\n{}", gbnf, lark, problem),
        }
    }

    #[test]
    fn whatever_is_written_is_answered(text in "(root ::= )?[ab\"\\[\\]()|*+?{}0-9,:=\\\\#\n x-]{0,40}") {
        let _ = to_lark(&text);
    }
}

const JSON: &str = r#"
# Any JSON object.
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,4})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"#;

#[test]
fn grammars_of_the_usual_kinds_are_followed() {
    let arithmetic = "root ::= (expr \"=\" ws term \"\\n\")+\nexpr ::= term ([-+*/] term)*\n\
        term ::= ident | num | \"(\" ws expr \")\" ws\nident ::= [a-z] [a-z0-9_]* ws\nnum ::= [0-9]+ ws\n\
        ws ::= [ \\t\\n]*";
    let list =
        "root ::= item+\n# Of what is not a new line.\nitem ::= \"- \" [^\\r\\n\\x0b\\x0c\\x85\\u2028\\u2029]+ \"\\n\"";
    let chess = "root ::= \"1. \" move \" \" move \"\\n\" ([1-9] [0-9]? \". \" move \" \" move \"\\n\")+\n\
        move ::= (pawn | piece | castle) [+#]?\npiece ::= [NBKQR] [a-h]? [1-8]? \"x\"? [a-h] [1-8]\n\
        pawn ::= ([a-h] \"x\")? [a-h] [1-8] (\"=\" [NBKQR])?\ncastle ::= \"O-O\" \"-O\"?";
    let left = "root ::= root \"+\" digit\n  | digit\ndigit ::= [0-9]";
    for (gbnf, good, bad) in [
        (JSON, "{\"a\": [1, -2.5e3, true], \"\\u00e9\\n\": {}}", "{\"a\": [1 2]}"),
        (JSON, "{}", "[1]"),
        (arithmetic, "a_1 *( b +2)= 3\n", "a** = 3\n"),
        (list, "- é, one\n- two\n", "- one\n-two\n"),
        (chess, "1. e4 e5\n2. Nf3 O-O-O+\n", "1. e4 e9\n"),
        (left, "1+2+3", "1+"),
        ("root ::= \"root ::= \"", "root ::= ", "root"),
        ("root ::= x x\nx ::= [a-z]+", "ab", "a"),
        ("root ::= ([a-z]+){2}", "ab", "a"),
    ] {
        let followed = followed(gbnf).unwrap_or_else(|problem| panic!("{gbnf}: {problem}"));
        assert!(followed.allows(good) && !followed.allows(bad), "{gbnf}\n{}", to_lark(gbnf).unwrap());
    }
}

/// What makes masks cheap: the inside of a text is one terminal, and so are words.
#[test]
fn long_terminals_are_formed_where_they_are_the_only_way() {
    let lark = to_lark(JSON).unwrap();
    assert!(lark.contains("\"true\"") && lark.contains("-\\x{10ffff}]+/"), "{lark}");
    let lark = to_lark("root ::= [ab]* \"ac\" | \"abc\"").unwrap();
    assert!(!lark.contains('+') && !lark.contains('"'), "{lark}");
}

#[test]
fn what_is_wrong_is_told_with_line_and_column() {
    for (gbnf, says) in [
        ("root ::= \"a\n", "line 1, column 10: this text is not closed"),
        ("root ::= [a\n", "line 1, column 10: this class is not closed"),
        ("root ::= a\na ::= (\"b\"", "line 2, column 7: this group is not closed"),
        ("root ::= a\n\nb ::= \"c\"", "line 1, column 10: no rule a is defined"),
        ("root ::= \"a\"\n a ::= b ::= \"c\"\nroot ::= \"b\"", "line 3, column 1: the rule root is defined twice"),
        ("a ::= \"b\"", "no rule root is defined"),
        ("root ::= * \"a\"", "line 1, column 10: * has nothing in front"),
        ("root ::= \"a\"{3,2}", "the most is less"),
        ("root ::= \"a\"*?", "line 1, column 14: a count of a count"),
        ("root ::= \"a\"{9999}", "line 1, column 14: a count of 0 to 2000"),
        ("root ::= \"\\q\"", "line 1, column 11: \\q is no escape"),
        ("root ::= \"\\u12\"", "4 hexadecimal digits"),
        ("root ::= [b-a]", "line 1, column 11: the range ends"),
        ("root ::= [\\x00-\\U0010ffff] [^\\x00-\\U0010ffff]", "no character is in this class"),
        ("root ::= <think>", "tokens by name or number"),
        ("root ::= \"a\")", "line 1, column 13: ) closes no group"),
        ("root ::= é", "'é' begins nothing"),
    ] {
        let problem = followed(gbnf).map(drop).expect_err(gbnf);
        assert!(problem.contains(says), "{gbnf}: {problem}");
    }
    let deep = format!("root ::= {}\"a\"{}", "(".repeat(100), ")".repeat(100));
    assert!(to_lark(&deep).unwrap_err().contains("more than 64 groups"));
}

/// What is too large to be looked at is read character by character, and what is too large at all refused.
#[test]
fn large_grammars_are_written_in_time() {
    let words: Vec<String> = (0..5000).map(|word| format!("\"w{word} \"")).collect();
    let begun = processor_time();
    assert!(!to_lark(&format!("root ::= ({})*", words.join(" | "))).unwrap().contains('"'));
    let ring = |body: &dyn Fn(usize) -> String, count: usize| -> String {
        let rules: String = (0..count).map(|rule| format!("r{rule} ::= {}\n", body((rule + 1) % count))).collect();
        format!("root ::= r0\n{rules}")
    };
    to_lark(&ring(&|next| format!("([a-z]* \"{next}\" r{next}?)*"), 300)).unwrap();
    // A chain tells its end to its beginning in as many turns as it has rules.
    to_lark(&ring(&|next| format!("r{next} | \"a{next}\" r{next}"), 400)).unwrap();
    to_lark(&format!("{}r9000 ::= \"a\"", ring(&|next| format!("r{}", next.max(1)), 9000))).unwrap();
    to_lark(&format!("root ::= ({}x)*\nx ::= [a] | \"bc\" [d]", "x | ".repeat(10_000))).unwrap();
    for large in ["\"abc\" ".repeat(20_000), "a".repeat(100_000) + "*", "[abc]".repeat(20_000), "| ".repeat(60_000)] {
        let problem = to_lark(&format!("root ::= {large}")).unwrap_err();
        assert!(problem.contains("parts up to here") || problem.contains("no rule"), "{problem}");
    }
    let took = processor_time() - begun;
    assert!(took < std::time::Duration::from_secs(20), "{took:?}");
}

/// What this thread has had: a busy machine takes nothing away from it.
fn processor_time() -> std::time::Duration {
    let figures = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux tells");
    let nanoseconds = figures.split(' ').next().and_then(|figure| figure.parse().ok());
    std::time::Duration::from_nanos(nanoseconds.expect("the first figure is the time on a processor"))
}
